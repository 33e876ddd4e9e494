"""Where the device's time goes: kernels of a decode step and of a prompt, by torch's profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.clock import synchronize
from benchmarks.gpu.engine import BenchEngine
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Report

_STEPS, _MOST, _NAME_LENGTH = 16, 12, 70


def measure_profile(plan: Plan, report: Report, limits: Limits) -> None:
    """Of each geometry, a step at each batch and one long prompt: which kernels take most, and how often each runs."""
    for name, geometry in plan.geometries.items():
        with BenchEngine(plan, geometry, enable_prefix_caching=False) as engine:
            for batch in plan.batches:
                ids = [engine.add(plan.context, 4 * _STEPS + 16) for _ in range(batch)]
                while not all(len(engine.tokens[request_id]) > 3 for request_id in ids):
                    engine.step()
                _report(f"{name} b{batch}", report, engine, _steps(engine), _STEPS)
                engine.drop_all()
            engine.add(plan.prefill_tokens, 1)
            engine.finish()
            engine.add(plan.prefill_tokens, 1)
            _report(f"{name} prompt of {plan.prefill_tokens}", report, engine, engine.finish, 1)


def _steps(engine: BenchEngine) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_STEPS):
            engine.step()

    return run


def _report(where: str, report: Report, engine: BenchEngine, run: Callable[[], object], num_steps: int) -> None:
    is_cuda = engine.device.type == "cuda"
    synchronize(engine.device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiled:
        run()
        synchronize(engine.device)
    times = {
        event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total, event.count)
        for event in profiled.key_averages()
    }
    total_us = sum(took_us for took_us, _ in times.values())
    report.add(f"{where}, all kernels", total_us / num_steps, "us")
    for key, (took_us, count) in sorted(times.items(), key=lambda item: -item[1][0])[:_MOST]:
        note = f"{count / num_steps:.1f} a step, {key[:_NAME_LENGTH]}"
        report.add(f"{where}, {took_us / max(total_us, 1e-9):.0%}", took_us / num_steps, "us", note=note)
