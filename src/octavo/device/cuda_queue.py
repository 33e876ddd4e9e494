"""The queue of a CUDA device: its current stream, events, and graphs."""

from collections.abc import Callable

import torch

from octavo.errors import EngineDeadError


class CudaQueue:
    """See `DeviceQueue`. Everything runs on the stream that is current at launch."""

    def __init__(self) -> None:
        self._capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the default stream cannot be captured
        self._pool = torch.cuda.graph_pool_handle()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        # torch's pool of pinned memory reuses a buffer only after the copies that use it are done.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return lambda: _wait(event)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            step()  # load libraries, compile kernels and allocate workspaces: none of that can be captured
        current.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


def _wait(event: torch.cuda.Event) -> None:
    try:
        event.synchronize()
    except RuntimeError as error:
        raise EngineDeadError(f"the GPU failed and this process cannot use it any more: {error}") from error
