"""Time on a device: by its own events, or by the host's clock on a CPU."""

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timing_event() -> torch.cuda.Event:
    """Return an event that tells the time between it and another."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no type for it


def seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.3) -> float:
    """Return the time of one call: the best of several rounds, after some calls to warm up."""
    run()
    synchronize(device)
    start_s = time.perf_counter()
    run()
    synchronize(device)
    once_s = max(time.perf_counter() - start_s, 1e-6)
    num_calls = max(1, min(50, int(budget_s / 5 / once_s)))
    return min(_round(run, device, num_calls) for _ in range(5 if once_s < budget_s else 1))


def _round(run: Callable[[], object], device: torch.device, num_calls: int) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(num_calls):
            run()
        return (time.perf_counter() - start_s) / num_calls
    start, end = timing_event(), timing_event()
    start.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num_calls


def graph_seconds(run: Callable[[], object], num_calls: int = 20) -> float:
    """Return the time of one call within a captured graph of several: what launches cost is nearly hidden."""
    if not torch.cuda.is_available():
        return seconds(run, torch.device("cpu"))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            run()
    return min(_round(graph.replay, torch.device("cuda"), 1) for _ in range(5)) / num_calls
