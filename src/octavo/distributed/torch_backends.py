"""torch's stores and communication backends, without its default process group.

Imported from where torch.distributed gets them; torch builds without distributed support lack that module.
"""

from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from octavo.distributed.rendezvous import Rendezvous

# For all ranks to arrive: they may have to import torch first, on a busy machine.
_MEETING_TIMEOUT = timedelta(minutes=2)
# For one collective. A rank may wait while another computes; dead ranks are detected by the executor.
_TIMEOUT = timedelta(minutes=30)


def open_store(rendezvous: Rendezvous, rank: int, world_size: int) -> c10d.Store:
    """Open the key-value store for the rendezvous."""
    if rendezvous.store_fd is not None:
        store = c10d.FileStore(f"/proc/self/fd/{rendezvous.store_fd}", world_size)
        store.set_timeout(_MEETING_TIMEOUT)
        return store
    assert rendezvous.store_address is not None, "several ranks need a store"
    host, _, port = rendezvous.store_address.rpartition(":")
    return c10d.TCPStore(
        host,
        int(port),
        world_size,
        is_master=rank == 0,
        timeout=_MEETING_TIMEOUT,
        master_listen_fd=rendezvous.listen_fd,
    )


def gloo(store: c10d.Store, name: str, rank: int, size: int, rendezvous: Rendezvous) -> c10d.Backend:
    """Connect over TCP; on one host over loopback."""
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # what torch.distributed itself calls
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
    options._timeout = _TIMEOUT
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, options)


def nccl(store: c10d.Store, name: str, rank: int, size: int, rendezvous: Rendezvous) -> c10d.Backend:
    """Connect CUDA devices; NCCL chooses the transport."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, size, options)
