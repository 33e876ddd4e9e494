"""How the ranks of one replica find each other. Created by the executor; groups are made from it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What one rank needs to find the others; a single rank needs nothing.

    On one host: inherited in-memory files. They have no name, so two engines cannot meet by mistake and nothing is left
    behind, however the ranks end. On several hosts: an address.
    """

    store_fd: int | None = None  # one host: empty file for a store, reopened as /proc/self/fd/N
    memory_fd: int | None = None  # one host: empty file that collectives resize and map
    store_address: str | None = None  # several hosts: "host:port" of the store on rank 0
    listen_fd: int | None = None  # several hosts, rank 0 only: the socket already listening there
    host: str = "127.0.0.1"  # address of this rank for the others
    local_rank: int = 0  # index among the ranks of its host that see the same devices
