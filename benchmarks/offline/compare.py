"""Octavo beside transformers on the same geometry, in one run: decode at several batch sizes, and prefill.

    python -m benchmarks.offline.compare [--cells decode:1 decode:8 decode:32 prefill:1024] [--repeats 3] [--out FILE]
        [--quantization int8] [--model-impl transformers]

Random weights of Qwen3-0.6B's geometry in bfloat16, 128 tokens in and 64 out for decode. Each engine runs in a process
of its own, one after the other, and they take turns `--repeats` times, so that a noisy neighbor hits both; the table
shows medians. Roofline: weight and KV bytes over the memory bandwidth measured in the same run, and operations over
the matrix rate measured in the same run (in bfloat16 or float32, whichever is faster), whichever takes longer. With
`--quantization` Octavo's weights are integers, and so are the bytes of the roofline; all else stays as it is. With
`--model-impl transformers` Octavo runs the library's own code, as for models that it does not know.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.geometry import QWEN3_0_6B, kv_bytes_per_token, parameter_counts, write_checkpoint
from octavo.kernels.quantization import QUANTIZATIONS, get_quantization

NUM_IN, NUM_OUT = 128, 64
ENGINES = ("octavo", "transformers")


# Takes a number of prompts, their tokens and the tokens behind each; returns seconds.
Generate = Callable[[int, int, int], float]


def run_octavo(folder: Path, cells: list[str], quantization: str | None, model_impl: str) -> dict[str, float]:
    """Return tokens per second of each cell, and seconds until ready."""
    start_s = time.perf_counter()
    generate = load_octavo(folder, quantization, model_impl)
    return {"ready_s": time.perf_counter() - start_s} | measure(cells, generate)


def load_octavo(folder: Path, quantization: str | None, model_impl: str = "auto") -> Generate:
    """Return what generates by an engine with random weights."""
    from octavo import LLM, SamplingParams
    from octavo.inputs import Prompt

    options: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 64, "enable_prefix_caching": False}
    llm = LLM(str(folder), load_format="dummy", quantization=quantization, model_impl=model_impl, **options)

    def generate(batch: int, num_in: int, num_out: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts(batch, num_in)]
        begun_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun_s

    return generate


def run_transformers(folder: Path, cells: list[str]) -> dict[str, float]:
    """The same with transformers' generate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    start_s = time.perf_counter()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    block = torch.randn(1 << 20, dtype=torch.bfloat16) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for first in range(0, len(flat), len(block)):
                flat[first : first + len(block)] = block[: len(flat) - first]
    model.model.rotary_emb.__init__(config)  # buffers came from the meta device
    model.generation_config.eos_token_id = None
    results = {"ready_s": time.perf_counter() - start_s}

    @torch.inference_mode()
    def generate(batch: int, num_in: int, num_out: int) -> float:
        ids = torch.tensor(random_prompts(batch, num_in))
        begun_s = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_out, min_new_tokens=num_out
        )
        return time.perf_counter() - begun_s

    return results | measure(cells, generate)


def measure(cells: list[str], generate: Generate) -> dict[str, float]:
    """Run every cell once, memory being warm. Decode counts the time after the first token of all.

    Memory that nobody has touched before costs more than computing on it: on a virtual machine, 100 to 200 ms for the
    activations and keys of 1,024 tokens. So each cell has a run of its size before it, for every engine alike.
    """
    generate(1, 32, 4)
    results = {}
    for cell in cells:
        kind, size = cell.split(":")
        if kind == "decode":
            first_s = generate(int(size), NUM_IN, 1)
            results[cell] = int(size) * (NUM_OUT - 1) / (generate(int(size), NUM_IN, NUM_OUT) - first_s)
        else:
            generate(1, int(size), 1)
            results[cell] = int(size) / generate(1, int(size), 1)
    return results


def random_prompts(batch: int, length: int) -> list[list[int]]:
    import random

    source = random.Random(batch * 1000 + length)
    return [[source.randrange(1000, 150000) for _ in range(length)] for _ in range(batch)]


def probe_machine() -> dict[str, float]:
    """Measure what the machine can do: reading bandwidth in bytes/s, matrix rate in operations/s."""
    import torch

    data = torch.ones(1 << 28, dtype=torch.float32)  # 1 GiB, beyond every cache
    reading = min(timed(lambda: float(data.sum())) for _ in range(5))
    a = torch.randn(4096, 4096)
    product = min(timed(partial(torch.mm, x, x)) for x in (a.bfloat16(), a) for _ in range(3))
    return {"bytes_per_s": data.nbytes / reading, "flops_per_s": 2 * 4096**3 / product}


def timed(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def weight_bytes(quantization: str | None) -> tuple[float, float]:
    """Return the bytes of all layers and of the logits head. Integers with scales: as a map of 1024 x 1024 has them."""
    layers, table = parameter_counts(QWEN3_0_6B)
    if quantization is None:
        return 2.0 * layers, 2.0 * table
    forms = get_quantization(quantization)
    return layers * forms.linear.num_bytes(1024, 1024) / 1024**2, table * forms.logits.num_bytes(1024, 1024) / 1024**2


def roofline(cell: str, machine: dict[str, float], quantization: str | None = None) -> float:
    """Return the tokens per second that bytes and operations allow."""
    layers, table = parameter_counts(QWEN3_0_6B)
    layers_bytes, table_bytes = weight_bytes(quantization)
    kind, size = cell.split(":")
    if kind == "decode":
        batch = int(size)
        num_bytes = layers_bytes + table_bytes + batch * (NUM_IN + NUM_OUT / 2) * kv_bytes_per_token(QWEN3_0_6B)
        return batch / max(num_bytes / machine["bytes_per_s"], 2 * batch * (layers + table) / machine["flops_per_s"])
    return int(size) / max(2 * int(size) * layers / machine["flops_per_s"], layers_bytes / machine["bytes_per_s"])


def run_in_process(
    engine: str, folder: Path, cells: list[str], quantization: str | None, model_impl: str
) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.offline.compare", "--engine", engine, "--folder", str(folder)]
    command += ["--model-impl", model_impl]
    if quantization is not None:
        command += ["--quantization", quantization]
    done = subprocess.run([*command, "--cells", *cells], check=True, capture_output=True, text=True)
    results: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return results


def compare(cells: list[str], repeats: int, quantization: str | None, model_impl: str) -> dict[str, Any]:
    """Let the engines take turns; return medians, ratios and fractions of the roofline."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "qwen3-0.6b", QWEN3_0_6B)
        machine = probe_machine()
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
        for _ in range(repeats):
            for engine in ENGINES:
                runs[engine].append(run_in_process(engine, checkpoint, cells, quantization, model_impl))
    medians = {
        engine: {cell: statistics.median(run[cell] for run in results) for cell in ["ready_s", *cells]}
        for engine, results in runs.items()
    }
    return {
        "command": " ".join(["python -m benchmarks.offline.compare", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "cpu": platform.processor() or platform.machine(),
        "machine": machine,
        "quantization": quantization,
        "model_impl": model_impl,
        "roofline": {cell: roofline(cell, machine, quantization) for cell in cells},
        "medians": medians,
        "runs": runs,
    }


def table(report: dict[str, Any]) -> str:
    lines = ["| cell | Octavo tok/s | transformers tok/s | ratio | of roofline |", "| --- | --- | --- | --- | --- |"]
    ours, theirs = (report["medians"][engine] for engine in ENGINES)
    for cell, limit in report["roofline"].items():
        ratio = ours[cell] / theirs[cell]
        lines.append(f"| {cell} | {ours[cell]:.1f} | {theirs[cell]:.1f} | {ratio:.2f} | {ours[cell] / limit:.0%} |")
    lines.append(f"| ready, s | {ours['ready_s']:.2f} | {theirs['ready_s']:.2f} | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["decode:1", "decode:8", "decode:32", "prefill:1024"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--quantization", choices=tuple(QUANTIZATIONS), help="of Octavo's weights")
    parser.add_argument("--model-impl", choices=("auto", "transformers"), default="auto", help="Octavo's")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        is_ours = args.engine == "octavo"
        ours = partial(run_octavo, quantization=args.quantization, model_impl=args.model_impl)
        run = ours if is_ours else run_transformers
        print(json.dumps(run(args.folder, args.cells)))
        return
    report = compare(args.cells, args.repeats, args.quantization, args.model_impl)
    print(table(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
