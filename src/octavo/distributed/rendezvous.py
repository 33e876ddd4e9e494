"""Where the ranks of one replica meet. Whoever starts the ranks makes it; the groups are made from it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What one rank needs to find the others. A rank alone needs nothing.

    On one host, files in memory that every rank has inherited: they have no name, so two engines cannot meet by
    mistake and nothing is left behind, however the ranks end. On several hosts, an address.
    """

    store_fd: int | None = None  # one host: empty file for a store; opened again as /proc/self/fd/N
    memory_fd: int | None = None  # one host: empty file that collectives may give a size and map
    store_address: str | None = None  # several hosts: "host:port" where rank 0 keeps the store
    listen_fd: int | None = None  # several hosts, rank 0 only: the socket that listens there already
    host: str = "127.0.0.1"  # by which the others reach this rank
    local_rank: int = 0  # number of this rank among those of its host that see the same devices
