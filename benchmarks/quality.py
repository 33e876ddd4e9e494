"""What quantisation costs in quality, on the demo model's held-out text, beside the bfloat16 weights.

    python -m benchmarks.quality [--count 40] [--out FILE]

For each position of answers that were held out of the training: the Kullback-Leibler divergence of the quantised
model's next token from the plain one's, in nats, and how often both find the same token likeliest.

Legend: T = tokens, V = vocabulary.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.models.paged import CPU, PagedRunner
from tools.demo_model.corpus import TASKS, held_out
from tools.demo_model.template import question_and_answer

from octavo.attention.selector import select_attention
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.kernels.dispatch import Kernels, select_kernels
from octavo.kernels.native import NativeKernels
from octavo.kernels.native_integers import IntegerNativeKernels
from octavo.kernels.quantization import IntegerFormat, Quantization
from octavo.layers.context import BuildContext
from octavo.loader.base import get_model_loader
from octavo.loader.hub import resolve_model
from octavo.models.interfaces import CausalLM
from octavo.tokenizer.tokenizer import Tokenizer

SEED = 2026
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


def load(kernels: Kernels) -> CausalLM:
    """Return the demo model computed by these kernels."""
    dtype = torch.bfloat16
    context = BuildContext(kernels=kernels, attention=select_attention(CPU, dtype), dtype=dtype, device=CPU)
    config = read_model_config(resolve_model("demo"), model="demo", dtype="bfloat16")
    return get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, context)


def texts(count: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of a held-out question and answer, and how many of them are the question."""
    tokenizer = Tokenizer.from_path(resolve_model("demo"))
    for task in TASKS:
        for example in held_out(task, count, SEED):
            question, answer = (
                tokenizer.encode(text, add_special_tokens=False) for text in question_and_answer(example)
            )
            yield question + answer, len(question)


def log_probabilities(model: CausalLM, tokens: list[int], first: int) -> torch.Tensor:
    """Return what the model expects after each token from the last of the question on: [T, V] float64."""
    runner = PagedRunner(model, num_blocks=64, block_size=32)
    [logits] = runner.step({0: tokens})
    return logits[first - 1 : -1].double().log_softmax(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="questions of each task")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    kernels = select_kernels(CPU, torch.bfloat16)
    assert isinstance(kernels, NativeKernels), "weights in integers need the C++ kernels"
    samples = list(texts(options.count))
    plain = load(kernels)
    expected = [log_probabilities(plain, *sample) for sample in samples]
    report = {}
    print("| weights | KL divergence, nats | same likeliest token |\n| --- | --- | --- |")
    for name, (linear, logits) in FORMS.items():
        model = load(IntegerNativeKernels(kernels, Quantization(name=name, linear=linear, logits=logits)))
        found = [log_probabilities(model, *sample) for sample in samples]
        report[name] = compare(expected, found)
        print(f"| {name} | {report[name]['kl']:.5f} | {report[name]['agreement']:.2%} |")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def compare(expected: list[torch.Tensor], found: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean divergence and agreement over all positions."""
    plain, quantised = torch.cat(expected), torch.cat(found)  # [T, V] each
    divergence = (plain.exp() * (plain - quantised)).sum(dim=-1).mean()
    agreement = (plain.argmax(dim=-1) == quantised.argmax(dim=-1)).double().mean()
    return {"kl": float(divergence), "agreement": float(agreement), "positions": float(len(plain))}


if __name__ == "__main__":
    main()
