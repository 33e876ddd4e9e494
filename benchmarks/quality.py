"""What quantisation costs in quality, on the demo model's held-out text, beside the bfloat16 weights.

    python -m benchmarks.quality [--count 40] [--all-forms] [--out FILE]

For each position of answers that were held out of the training: the Kullback-Leibler divergence of the quantised
model's next token from the plain one's, in nats, and how often both find the same token likeliest. Beside Octavo's
own forms, llama.cpp's of the same weights where `benchmarks.peers.install llama.cpp` has been: its bf16 row shows what
another engine's rounding alone comes to. llama.cpp's K forms need rows of a multiple of 256, which the demo model's
are; a tensor with other rows it keeps in more bits by itself (Q4_K as Q5_0, Q5_K as Q5_1, Q6_K as Q8_0).

Legend: T = tokens, V = vocabulary.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tests.models.paged import CPU, PagedRunner
from tools.demo_model.corpus import TASKS, held_out
from tools.demo_model.template import question_and_answer

from benchmarks.peers.environment import environment
from benchmarks.peers.registry import LLAMA_CPP, ROOT, PeerMissingError
from octavo.attention.selector import select_attention
from octavo.config.engine import KVCacheDType, LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.quantization import IntegerFormat, Quantization, get_quantization
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import MadeAtLoad
from octavo.layers.quant.registry import check_made_at_load
from octavo.loader.base import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.tokenizer.tokenizer import Tokenizer

SEED = 2026
Sample = tuple[list[int], int]  # tokens of a question and its answer, how many of them are the question
INT8 = IntegerFormat(bits=8, group_size=None)
FORMS = {
    "int8": (INT8, INT8),
    "int8 g128": (IntegerFormat(bits=8, group_size=128), INT8),
    **{f"int4 g{size}": (IntegerFormat(bits=4, group_size=size), INT8) for size in (32, 64, 128)},
    **{
        f"int4 g{size}, logits int4 g{head}": (
            IntegerFormat(bits=4, group_size=size),
            IntegerFormat(bits=4, group_size=head),
        )
        for size, head in ((128, 128), (128, 32), (32, 32))
    },
}


def load(quantization: Quantization | None = None, kv_cache_dtype: KVCacheDType = "auto") -> CausalLM:
    """Return the demo model with weights made at load."""
    dtype, schemes = torch.bfloat16, MadeAtLoad(quantization)
    kernels = select_kernels(CPU, dtype, schemes.forms)
    check_made_at_load(schemes, kernels, "this machine")
    attention = select_attention(CPU, dtype, kv_cache_dtype=kv_cache_dtype)
    context = BuildContext(kernels=kernels, attention=attention, dtype=dtype, device=CPU, schemes=schemes)
    config = read_model_config(resolve_model("demo"), model="demo", dtype="bfloat16")
    return get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, context)


def own_models(has_all_forms: bool) -> Iterator[tuple[str, CausalLM]]:
    """Yield what Octavo makes of the weights, keys and values; with `has_all_forms`, group sizes it does not offer too.

    Raises:
        InvalidParameterError: without the C++ kernels there are no weights in integers.
    """
    for name in ("int8", "int4"):
        yield name, load(get_quantization(name))
    yield "bf16, keys and values int8", load(None, "int8")
    for name in ("int8", "int4"):
        yield f"{name}, keys and values int8", load(get_quantization(name), "int8")
    if has_all_forms:
        for name, (linear, logits) in FORMS.items():
            yield f"form {name}", load(Quantization(name=name, linear=linear, logits=logits))


def llama_rows(samples: list[Sample]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield what llama.cpp expects with the demo model's weights in each of its forms.

    Raises:
        PeerMissingError: when it is not installed.
    """
    python = LLAMA_CPP.python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("config.json", "model.safetensors"):
            (folder / file).symlink_to((resolve_model("demo") / file).resolve())
        tokens, out = folder / "tokens.json", folder / "logits.npz"
        tokens.write_text(json.dumps([text for text, _ in samples]))
        for precision in ("bf16", "q8_0", "q4_0", "q4_k_m"):
            command = [str(python), "-m", "benchmarks.peers.llama_cpp_logits", *map(str, (folder, tokens, out))]
            run_quietly([*command, "--precision", precision])
            with np.load(out) as arrays:
                found = [torch.from_numpy(arrays[f"arr_{number}"]) for number in range(len(samples))]
            yield f"llama.cpp {precision}", [answered(*pair) for pair in zip(found, samples, strict=True)]


def run_quietly(command: list[str]) -> None:
    """Run a command of llama.cpp, which tells much; show it only when it fails."""
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment(LLAMA_CPP), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")


def texts(count: int) -> Iterator[Sample]:
    """Yield the tokens of a held-out question and answer, and how many of them are the question."""
    tokenizer = Tokenizer.from_path(resolve_model("demo"))
    for task in TASKS:
        for example in held_out(task, count, SEED):
            question, answer = (
                tokenizer.encode(text, add_special_tokens=False) for text in question_and_answer(example)
            )
            yield question + answer, len(question)


def log_probabilities(model: CausalLM, sample: Sample) -> torch.Tensor:
    """Return what the model expects after each token from the last of the question on: [T, V] float64."""
    runner = PagedRunner(model, num_blocks=64, block_size=32)
    [logits] = runner.step({0: sample[0]})
    return answered(logits, sample)


def answered(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Return the log-probabilities of the answer's positions: [T, V] float64."""
    _, first = sample
    return logits[first - 1 : -1].double().log_softmax(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="questions of each task")
    parser.add_argument("--all-forms", action="store_true", help="group sizes that Octavo does not offer, too")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    samples = list(texts(options.count))
    plain = load()
    expected = [log_probabilities(plain, sample) for sample in samples]
    report = {}
    print("| weights | KL divergence, nats | same likeliest token |\n| --- | --- | --- |")
    for name, found in rows(samples, options.all_forms):
        report[name] = compare(expected, found)
        print(f"| {name} | {report[name]['kl']:.5f} | {report[name]['agreement']:.2%} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def rows(samples: list[Sample], has_all_forms: bool) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the name of each form, and what it expects in each sample."""
    for name, model in own_models(has_all_forms):
        yield name, [log_probabilities(model, sample) for sample in samples]
    try:
        yield from llama_rows(samples)
    except PeerMissingError as error:
        print(error, file=sys.stderr)


def compare(expected: list[torch.Tensor], found: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean divergence and agreement over all positions."""
    plain, quantised = torch.cat(expected), torch.cat(found)  # [T, V] each
    divergence = (plain.exp() * (plain - quantised)).sum(dim=-1).mean()
    agreement = (plain.argmax(dim=-1) == quantised.argmax(dim=-1)).double().mean()
    return {"kl": float(divergence), "agreement": float(agreement), "positions": float(len(plain))}


if __name__ == "__main__":
    main()
