"""One op at one size: compared with its definition, timed, and shown beside the roofline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.report import Report

COLD_BYTES = 256 << 20  # of copies that are taken in turn: more than the caches hold
# Both sides round to the dtype several times on the way. A wrong term shows as a part of the largest value.
_TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 1e-4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size."""

    name: str
    run: Callable[[], torch.Tensor]
    define: Callable[[], torch.Tensor]  # the same by the reference
    num_bytes: float
    num_operations: float = 0.0
    is_exact: bool = False  # not one bit may differ


def measure_all(
    cases: Iterator[Case], where: str, report: Report, limits: Limits, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare and time ops one by one; `where` says at which size."""
    for case in cases:
        name = f"{case.name}, {where}"
        try:
            error = _error(case)
            time_s = seconds(case.run, device, budget_s=0.1)
        except Exception as failure:  # noqa: BLE001 - the next op may work
            report.add(name, "failed", is_right=False, note=f"{type(failure).__name__}: {failure}"[:300])
            continue
        share = limits.share(time_s, case.num_bytes, case.num_operations)
        is_right = error <= (0.0 if case.is_exact else _TOLERANCES[dtype])
        note = f"{error:.1e} of all differ" if case.is_exact else f"error {error:.1e}"
        report.add(name, time_s * 1e6, "us", of_roofline=share, is_right=is_right, note=note)


def _error(case: Case) -> float:
    """Return the largest error as a part of the largest value; of exact ops, how many of all numbers are others."""
    found, wanted = case.run(), case.define()
    if case.is_exact:
        return float((found != wanted).double().mean())
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).abs().max() / wanted.abs().max())
