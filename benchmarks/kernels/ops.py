"""Every op of a decoder layer beside the roofline of this machine.

    python -m benchmarks.kernels.ops [--dtype bfloat16] [--threads 2] [--rows 1 8 32 256] [--reference]
        [--quantization int8 | --blocks Q4_K]

Shapes are Qwen3-0.6B's; experts are Qwen3-30B-A3B's, half as many. Weights and KV are taken in turn from copies of
together 512 MiB, as in a model, where a layer's weights are cold when its turn comes. Each time is the best of many
runs. "GB/s" and "T/s" count the bytes and operations that the op cannot do without; the roofline is the longer of those
bytes over the read bandwidth and those operations over the matmul rate (in the dtype or in float32, whichever is
faster), all measured in the same run; "of roof" is that time over the measured one. Above 100 % a shared last-level
cache helped, or a neighbor disturbed the probe.
`--reference` measures the plain torch ops that define each kernel. With `--quantization` bytes are those of the
integers; operations are still compared with the same rate. With `--blocks` weights are in blocks of GGUF files.

Legend: T = rows (tokens, or requests that decode), C = context positions, V = vocabulary.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import torch

from benchmarks.kernels.attention import Cell, attention_run
from benchmarks.kernels.cold import num_copies
from benchmarks.kernels.roofline import best_seconds, matmul_rate, read_bandwidth
from octavo.attention.selector import select_attention
from octavo.gguf.types import GGML_TYPES
from octavo.kernels.blocks import BlockFormat, BlockWeight
from octavo.kernels.dispatch import native_kernels, select_kernels
from octavo.kernels.native import NativeKernels
from octavo.kernels.quantization import QUANTIZATIONS, Weight, WeightFormat, get_quantization
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Fused, LinearRole, PackedExperts, PackedLinear, Routing
from octavo.layers.quant.registry import check_quantization_at_load, make_schemes
from octavo.sampling.draw import SamplingMetadata, draw
from octavo.sampling.rows import SamplingRows
from octavo.sampling_params import SamplingParams

Form = WeightFormat | None  # of weights; None: dense
CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
VOCAB = 151936
MAX_HEAD_ROWS = 128  # a prompt has one
DRAWS = {
    "the largest": SamplingParams(temperature=0.0, seed=0, logprobs=0),  # metadata is for more than argmax
    "temperature": SamplingParams(seed=0),
    "top-k 50": SamplingParams(seed=0, top_k=50),
    "top-p 0.9": SamplingParams(seed=0, top_p=0.9),
}
CONTEXTS = (160, 1024)
LONG_CONTEXT = 16384
NUM_EXPERTS, TOP_K, EXPERT_HIDDEN, EXPERT_INTERMEDIATE = 64, 8, 2048, 768
NUM_EXPERT_LAYERS = 2  # of 0.6 GB each in bfloat16; several inputs choose different experts in turn


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    num_operations: int = 0


def linear_cases(kernels: Kernels, form: Form, num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Time each linear layer."""
    for name, (num_outputs, in_size) in LINEARS.items():
        weight, x = random_weight(form, dtype, in_size, num_outputs), torch.randn(num_rows, in_size).to(dtype)
        num_bytes = packed_bytes(kernels, pack(kernels, weight, form), weight)
        copies = [pack(kernels, weight, form) for _ in range(num_copies(num_bytes))]
        yield Case(
            name=f"linear {name} {num_outputs}x{in_size}",
            run=linear_run(kernels, x, copies),
            num_bytes=num_bytes + x.nbytes + num_rows * num_outputs * dtype.itemsize,
            num_operations=2 * num_rows * num_outputs * in_size,
        )


def random_weight(form: Form, dtype: torch.dtype, in_size: int, *parts: int) -> Weight:
    """Return a weight of so many outputs in each part, in blocks if `form` is of some."""
    if not isinstance(form, BlockFormat):
        return torch.randn(sum(parts), in_size).to(dtype)
    (kind,) = form.kinds
    row_bytes = in_size // kind.block_size * kind.block_bytes
    # Below 0x40, scales are float16 numbers from 0 to 2.
    rows = tuple(torch.randint(0x40, (size, row_bytes), dtype=torch.uint8) for size in parts)
    return BlockWeight(
        format=replace(form, types=form.types * len(parts), sizes=parts, row_inputs=in_size),
        parts=rows,
        in_size=in_size,
    )


def pack(kernels: Kernels, weight: Weight, form: Form, role: LinearRole = "plain") -> PackedLinear:
    """Pack a weight, which stays."""
    if isinstance(weight, BlockWeight):
        return kernels.pack_linear(weight, None, role, weight.format)
    assert isinstance(weight, torch.Tensor), "random weights are dense or in blocks"
    return kernels.pack_linear(weight.clone(), None, role, form)


def head_cases(kernels: Kernels, form: Form, num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Time the logits head of greedy rows, of which the largest result alone is kept. It is too large for any cache."""
    if num_rows > MAX_HEAD_ROWS:
        return
    weight, x = random_weight(form, dtype, HIDDEN, VOCAB), torch.randn(num_rows, HIDDEN).to(dtype)
    packed = pack(kernels, weight, form, "logits")
    yield Case(
        name=f"largest of head {VOCAB}x{HIDDEN}",
        run=lambda: kernels.logits_argmax(x, packed),
        num_bytes=packed_bytes(kernels, packed, weight) + x.nbytes,
        num_operations=2 * num_rows * VOCAB * HIDDEN,
    )


def linear_run(kernels: Kernels, x: torch.Tensor, copies: list[PackedLinear]) -> Callable[[], torch.Tensor]:
    turns = cycle(copies)
    return lambda: kernels.linear(x, next(turns))


def packed_bytes(kernels: Kernels, packed: PackedLinear, weight: Weight) -> int:
    """Return what a linear reads of its weight: as it is packed, or as it was where that is not shown."""
    if kernels.layout is not None:
        return sum(tensor.nbytes for tensor in packed.packed_tensors().values())
    if isinstance(weight, BlockWeight):
        return sum(rows.nbytes for rows in weight.parts)
    assert isinstance(weight, torch.Tensor), "random weights are dense or in blocks"
    return weight.nbytes


def expert_cases(kernels: Kernels, form: Form, num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Time a mixture of experts. Of the inputs, which take turns, that one counts which touches the fewest experts."""
    routing = Routing(num_experts=NUM_EXPERTS, top_k=TOP_K, renormalizes=True, has_shared=False)
    layers = [make_experts(kernels, form, dtype) for _ in range(NUM_EXPERT_LAYERS)]
    router = kernels.pack_linear(torch.randn(NUM_EXPERTS, EXPERT_HIDDEN).to(dtype), None, "router")
    inputs = [torch.randn(num_rows, EXPERT_HIDDEN).to(dtype) for _ in range(8)]
    norm, load = torch.ones(EXPERT_HIDDEN, dtype=dtype), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    touched = min(len(torch.unique(kernels.route(x, router, routing).expert_ids)) for x in inputs)
    turns, rest = cycle((x, experts) for x in inputs for experts in layers), torch.zeros_like(inputs[0])

    def run() -> object:
        x, experts = next(turns)
        return kernels.moe(x, Fused(residual=rest, norm_weight=norm, eps=1e-6), router, routing, experts, load)

    weights = 3 * EXPERT_HIDDEN * EXPERT_INTERMEDIATE
    linears = (layers[0].gate_up[0], 2 * EXPERT_INTERMEDIATE), (layers[0].down[0], EXPERT_INTERMEDIATE)
    of_expert = sum(
        packed_bytes(kernels, packed, torch.empty(size, EXPERT_HIDDEN, dtype=dtype)) for packed, size in linears
    )
    yield Case(
        name=f"moe {TOP_K} of {NUM_EXPERTS}, {touched} touched",
        run=run,
        num_bytes=touched * of_expert + (NUM_EXPERTS + 4 * num_rows) * EXPERT_HIDDEN * dtype.itemsize,
        num_operations=2 * num_rows * TOP_K * weights,
    )


def make_experts(kernels: Kernels, form: Form, dtype: torch.dtype) -> PackedExperts:
    gate_up = random_weight(form, dtype, EXPERT_HIDDEN, EXPERT_INTERMEDIATE, EXPERT_INTERMEDIATE)
    down = random_weight(form, dtype, EXPERT_INTERMEDIATE, EXPERT_HIDDEN)
    return kernels.pack_experts(
        [pack(kernels, gate_up, form, "gated") for _ in range(NUM_EXPERTS)],
        [pack(kernels, down, form) for _ in range(NUM_EXPERTS)],
    )


def small_cases(kernels: Kernels, num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Time the ops between the linear layers; all read and write each value once."""
    x, residual = torch.randn(num_rows, HIDDEN).to(dtype), torch.randn(num_rows, HIDDEN).to(dtype)
    heads = torch.randn(num_rows, HEADS, HEAD_DIM).to(dtype)
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE).to(dtype)
    weight, head_weight = torch.ones(HIDDEN, dtype=dtype), torch.ones(HEAD_DIM, dtype=dtype)
    fused = Fused(residual=residual, norm_weight=weight, eps=1e-6)
    cos, sin = torch.randn(num_rows, HEAD_DIM // 2), torch.randn(num_rows, HEAD_DIM // 2)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (lambda: kernels.rms_norm(x, weight, 1e-6), 2 * x.numel()),
        "add_rms_norm": (lambda: kernels.add_rms_norm(x, fused), 4 * x.numel()),
        "rms_norm of heads": (lambda: kernels.rms_norm(heads, head_weight, 1e-6), 2 * heads.numel()),
        "rotary": (lambda: kernels.rotary(heads, cos, sin), 2 * heads.numel()),
        "silu * up": (lambda: kernels.activate(gate_up, SILU), gate_up.numel() * 3 // 2),
    }
    for name, (run, num_values) in runs.items():
        yield Case(name=name, run=run, num_bytes=num_values * dtype.itemsize)


def draw_cases(native: NativeKernels | None, num_rows: int) -> Iterator[Case]:
    """Time the choice of T tokens: logits of a bell shape with ten that stand out, as real ones have."""
    logits, numbers = 2.5 * torch.randn(num_rows, VOCAB), np.arange(num_rows, dtype=np.int32)
    logits[:, 1000:1010] += 15.0
    for name, params in DRAWS.items():
        rows = SamplingRows(num_rows, VOCAB)
        for row in range(num_rows):
            rows.set_row(row, params, [], [], 0)
        step = rows.step(numbers, numbers)
        columns = {column: torch.from_numpy(values) for column, values in step.arrays[0].items()}
        metadata, is_filtered = SamplingMetadata(**columns), step.ending.is_filtered
        yield Case(
            name=f"draw: {name}, V = {VOCAB}",
            run=partial(draw, logits, metadata, is_filtered=is_filtered, native=native),
            num_bytes=logits.nbytes,
        )


def attention_cases(num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Time one decode step of T requests, and a prompt of T tokens, for each length of context."""
    for context in CONTEXTS:
        if num_rows * context <= 64 * 1024:
            yield attention_case(
                Cell(name=f"decode, C = {context}", num_requests=num_rows, context=context, dtype=dtype)
            )
    if num_rows > 1:
        yield attention_case(Cell(name="prompt", num_new=num_rows, context=num_rows, dtype=dtype))
    else:  # as a rank has it that shares kv heads with others
        cell = Cell(name=f"decode, 2 kv heads, C = {LONG_CONTEXT}", context=LONG_CONTEXT, dtype=dtype)
        yield attention_case(replace(cell, num_heads=2 * HEADS // KV_HEADS, num_kv_heads=2))


def attention_case(cell: Cell) -> Case:
    """Return a case of what benchmarks/kernels/attention.py has more of."""
    backend = select_attention(CPU, cell.dtype)
    return Case(
        name=f"{cell.name} ({backend.name})",
        run=attention_run(backend, cell),
        num_bytes=cell.num_bytes,
        num_operations=cell.num_operations,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--reference", action="store_true")
    kind.add_argument("--quantization", choices=tuple(QUANTIZATIONS), help="of the weights of linear layers")
    blocks = [kind.name for kind in GGML_TYPES.values() if kind.is_quantized]
    kind.add_argument("--blocks", choices=blocks, help="of GGUF files, that hold these weights")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    schemes = make_schemes(None, options.quantization)
    kernels: Kernels = Kernels() if options.reference else select_kernels(CPU, dtype, schemes.forms)
    check_quantization_at_load(schemes, kernels, f"a CPU with {options.dtype}")
    form: Form = get_quantization(options.quantization).linear if options.quantization else None
    if options.blocks:
        form = BlockFormat(types=(options.blocks,), sizes=(1,), row_inputs=1)
    own = kernels if isinstance(kernels, NativeKernels) else native_kernels()
    native = None if options.reference else own
    with torch.inference_mode():
        bandwidth, rate = read_bandwidth(), max(matmul_rate(dtype), matmul_rate(torch.float32))
        print(f"{kernels.name}, {options.dtype}, {options.threads} threads, torch {torch.__version__}: ", end="")
        print(f"reads {bandwidth / 1e9:.1f} GB/s, multiplies {rate / 1e12:.2f} T/s")
        for num_rows in options.rows:
            print(f"\n{f'T = {num_rows}':40}{'us':>10}{'GB/s':>8}{'T/s':>8}{'of roof':>10}")
            for cases in (linear_cases, head_cases, expert_cases):
                print_cases(cases(kernels, form, num_rows, dtype), bandwidth, rate)
            print_cases(small_cases(kernels, num_rows, dtype), bandwidth, rate)
            print_cases(attention_cases(num_rows, dtype), bandwidth, rate)
            print_cases(draw_cases(native, num_rows), bandwidth, rate)


def print_cases(cases: Iterator[Case], bandwidth: float, rate: float) -> None:
    """Run and print one line for each."""
    for case in cases:
        seconds = best_seconds(case.run)
        roof = max(case.num_bytes / bandwidth, case.num_operations / rate)
        print(f"{case.name:40}{seconds * 1e6:10.1f}{case.num_bytes / seconds / 1e9:8.1f}", end="")
        print(f"{case.num_operations / seconds / 1e12:8.3f}{roof / seconds:10.0%}")


if __name__ == "__main__":
    main()
