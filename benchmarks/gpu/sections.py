"""The sections of the benchmark. Each measures one thing and writes what it finds as it goes."""

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.geometry import kv_bytes_per_token, parameter_counts
from benchmarks.gpu.clock import synchronize
from benchmarks.gpu.engine import BenchEngine
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.limits import Limits, measure_machine
from benchmarks.gpu.low_bit import measure_low_bit
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.profile import measure_profile
from benchmarks.gpu.report import Report
from octavo.errors import UserError

_DRAWS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "penalized": {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.1},
    "rated": {"temperature": 1.0, "logprobs": 5},
}


def weights_read(geometry: dict[str, Any], itemsize: int = 2) -> int:
    """Return the bytes of weights that a step of decoding reads: all layers and the LM head."""
    layers, table = parameter_counts(geometry)
    return (layers + table) * itemsize


def measure_decode(plan: Plan, report: Report, limits: Limits) -> None:
    """Tokens per second at each batch, greedy; the largest batch also in every way to draw."""
    for name, geometry in plan.geometries.items():
        with BenchEngine(plan, geometry, enable_prefix_caching=False) as engine:
            for batch in plan.batches:
                _report_decode(plan, report, limits, engine, f"{name} b{batch}", geometry, batch)
            for label, params in _DRAWS.items():
                _report_decode(plan, report, limits, engine, f"{name} b{batch} {label}", geometry, batch, **params)
            report.add(f"{name} graphs captured", float(engine.num_graphs), note=engine.core.ready.profile)


def _report_decode(
    plan: Plan,
    report: Report,
    limits: Limits,
    engine: BenchEngine,
    name: str,
    geometry: dict[str, Any],
    batch: int,
    **params: Any,
) -> None:
    step_s, idle = engine.decode_s(batch, **params)
    kv_bytes = batch * (plan.context + plan.decode_steps // 2) * kv_bytes_per_token(geometry)
    num_operations = 2.0 * batch * sum(parameter_counts(geometry))
    share = limits.share(step_s, weights_read(geometry) + kv_bytes, num_operations)
    note = f"{step_s * 1e3:.3f} ms a step" + ("" if idle is None else f", device idle {idle:.0%}")
    report.add(name, batch / step_s, "tokens/s", of_roofline=share, note=note)


def measure_prefill(plan: Plan, report: Report, limits: Limits) -> None:
    """Time to the first token of one long prompt; the second of two, after compiling."""
    for name, geometry in plan.geometries.items():
        with BenchEngine(plan, geometry, enable_prefix_caching=False) as engine:
            took_s = 0.0
            for _ in range(2):
                engine.add(plan.prefill_tokens, 1)
                synchronize(engine.device)
                start_s = time.perf_counter()
                engine.finish()
                took_s = time.perf_counter() - start_s
        layers, _ = parameter_counts(geometry)
        heads = geometry["num_hidden_layers"] * geometry["num_attention_heads"] * geometry["head_dim"]
        num_operations = 2.0 * plan.prefill_tokens * layers + 2.0 * plan.prefill_tokens**2 * heads
        share = limits.share(took_s, weights_read(geometry), num_operations)
        report.add(f"{name} {plan.prefill_tokens} tokens", plan.prefill_tokens / took_s, "tokens/s", of_roofline=share)


def measure_workload(plan: Plan, report: Report, limits: Limits) -> None:
    """Requests with prompts and outputs of random lengths, all at once: nano-vllm's benchmark, temperature 0.6."""
    name, geometry = next(iter(plan.geometries.items()))
    lengths = random.Random(0)
    with BenchEngine(plan, geometry, enable_prefix_caching=False) as engine:
        kv_tokens = 0.0
        for _ in range(plan.workload_requests):
            num_in, num_out = (lengths.randint(*plan.workload_tokens) for _ in range(2))
            engine.add(num_in, num_out, temperature=0.6)
            kv_tokens += num_out * (num_in + num_out / 2)
        start_s, num_steps, num_tokens = time.perf_counter(), 0, 0
        while engine.core.has_work():
            num_tokens += engine.step()
            num_steps += 1
        took_s = time.perf_counter() - start_s
        share = limits.share(
            took_s, kv_tokens * kv_bytes_per_token(geometry) + num_steps * float(weights_read(geometry))
        )
        note = f"{num_tokens} tokens in {took_s:.2f} s, {num_steps} steps, {engine.num_graphs} graphs"
        label = f"{name}, {plan.workload_requests} requests"
        report.add(label, num_tokens / took_s, "tokens/s", of_roofline=share, note=note)


def measure_equality(plan: Plan, report: Report, limits: Limits) -> None:
    """Graphs against op by op, and a batch against each request alone: how many tokens are the same."""
    _, geometry = next(iter(plan.geometries.items()))
    prompts = random.Random(1)
    num_requests, num_tokens = min(5, max(plan.batches)), min(24, plan.context)
    asked = [
        [prompts.randrange(int(geometry["vocab_size"])) for _ in range(7 + 3 * index)] for index in range(num_requests)
    ]

    def answers(*, together: bool, **options: Any) -> list[list[int]]:
        with BenchEngine(plan, geometry, **{"num_kv_blocks": 1024, **options}) as engine:
            for index, prompt in enumerate(asked):
                engine.add_prompt(prompt, num_tokens, temperature=float(index % 2))
                if not together:
                    engine.finish()
            engine.finish()
            return list(engine.tokens.values())

    graphs = answers(together=True)
    for name, others in (
        ("graphs = op by op", answers(together=True, enforce_eager=True)),
        ("batch = alone", answers(together=False)),
    ):
        same = sum(a == b for left, right in zip(graphs, others, strict=True) for a, b in zip(left, right, strict=True))
        report.add(name, same / (num_requests * num_tokens), "of tokens", is_right=graphs == others)


def measure_deterministic(plan: Plan, report: Report, limits: Limits) -> None:
    """What `deterministic` costs a step of decoding. At 10 % or less it becomes the default on this device."""
    name, geometry = next(iter(plan.geometries.items()))
    times: dict[bool, list[float]] = {}
    for is_on in (False, True):
        try:
            with BenchEngine(plan, geometry, enable_prefix_caching=False, deterministic=is_on) as engine:
                times[is_on] = [engine.decode_s(batch)[0] for batch in plan.batches]
        except UserError as error:
            report.add("deterministic", "refused", note=str(error))
            return
    for batch, off_s, on_s in zip(plan.batches, times[False], times[True], strict=True):
        report.add(f"{name} b{batch} price", 100.0 * (on_s / off_s - 1.0), "%")


def measure_start(plan: Plan, report: Report, limits: Limits) -> None:
    """From an engine's first line to ready, and to a first token; the second time with what the first left on disk."""
    for name, geometry in plan.geometries.items():
        for start in ("first", "second"):
            with BenchEngine(plan, geometry) as engine:
                begin_s = time.perf_counter()
                engine.add(16, 1)
                engine.finish()
                first_token_s = time.perf_counter() - begin_s
                for _ in range(2):  # graphs for the second start to find
                    engine.add(16, 8)
                engine.finish()
                note = f"first token after {first_token_s * 1e3:.1f} ms more, {engine.num_graphs} graphs in the end"
                report.add(f"{name} {start} start, ready", engine.start_s, "s", note=note)


SECTIONS: dict[str, Callable[[Plan, Report, Limits], None]] = {
    "machine": measure_machine,
    "kernels": measure_kernels,
    "equality": measure_equality,
    "decode": measure_decode,
    "profile": measure_profile,
    "prefill": measure_prefill,
    "workload": measure_workload,
    "deterministic": measure_deterministic,
    "start": measure_start,
    "low_bit": measure_low_bit,
}
