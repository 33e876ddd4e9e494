"""What quantization costs in quality, beside the same model in float32.

    python -m benchmarks.quality [--model smollm2 [--dither]] [--beside FOLDER ...] [--out FILE]
    python -m benchmarks.quality [--count 40] [--all-forms] [--out FILE]

For each position: the Kullback-Leibler divergence of the quantized model's next token from that of float32, in nats,
and how often both find the same token likeliest. On the demo model the positions are answers that were held out of its
training. On any other, a real one say, they are those of the bundled texts, kind by kind; `--dither` takes the weights
of a GGUF file off their grid first. `--beside` adds checkpoints of the same model in other forms, such as those of
`octavo convert --quantize`; where weights are dithered, these are to be made of `--write-dithered FOLDER`, which does
nothing else.

On the demo model also llama.cpp's forms of the same weights where `benchmarks.peers.install llama.cpp` has been: its
bf16 row shows what another engine's rounding alone comes to. llama.cpp's K forms need rows of a multiple of 256, which
the demo model's are; a tensor with other rows it keeps in more bits by itself (Q4_K as Q5_0, Q5_K as Q5_1, Q6_K as
Q8_0).

Legend: T = tokens, V = vocabulary.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.models.paged import CPU, DTYPES, PagedRunner

from benchmarks.peers.environment import environment
from benchmarks.peers.registry import LLAMA_CPP, ROOT, PeerMissingError
from benchmarks.quality_texts import KINDS, DitheredGgufLoader, Sample, bundled_texts, demo_answers, write_dithered
from octavo.attention.selector import select_attention
from octavo.config.engine import KVCacheDType, LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.config.model import DType
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.quantization import IntegerFormat, Quantization, get_quantization
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import QuantizedAtLoad
from octavo.layers.quant.registry import check_quantization_at_load, make_schemes
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM

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


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    name: str = "demo"
    is_dithered: bool = False

    def load(
        self,
        dtype: DType = "bfloat16",
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        *,
        in_blocks: bool = False,
    ) -> CausalLM:
        """Return it with weights made at load, or `in_blocks` of its GGUF file."""
        torch_dtype, config = DTYPES[dtype], read_model_config(resolve_model(self.name), model=self.name, dtype=dtype)
        schemes = make_schemes(config.quantization) if in_blocks else QuantizedAtLoad(quantization)
        kernels = select_kernels(CPU, torch_dtype, schemes.forms)
        check_quantization_at_load(schemes, kernels, "this machine")
        attention = select_attention(CPU, torch_dtype, kv_cache_dtype=kv_cache_dtype)
        context = BuildContext(kernels=kernels, attention=attention, dtype=torch_dtype, device=CPU, schemes=schemes)
        load_config = LoadConfig(load_format="auto", seed=0, packed_cache_bytes=0)
        loader = DitheredGgufLoader(load_config) if self.is_dithered else get_model_loader(load_config)
        return loader.load_model(config, context)

    @property
    def has_blocks(self) -> bool:
        """Whether its GGUF file has quantized tensors."""
        return read_model_config(resolve_model(self.name), model=self.name, dtype="bfloat16").quantization is not None

    def load_beside(self, folder: Path) -> CausalLM:
        """Return another checkpoint of it, in the form that its weights have there."""
        config = read_model_config(folder, model=str(folder), dtype="bfloat16")
        schemes = make_schemes(config.quantization)
        kernels = select_kernels(CPU, torch.bfloat16, schemes.forms)
        attention = select_attention(CPU, torch.bfloat16)
        context = BuildContext(kernels=kernels, attention=attention, dtype=torch.bfloat16, device=CPU, schemes=schemes)
        return get_model_loader(LoadConfig(load_format="auto", seed=0, packed_cache_bytes=0)).load_model(
            config, context
        )

    def forms(self, has_all_forms: bool) -> Iterator[tuple[str, Callable[[], CausalLM]]]:
        """Yield what Octavo makes of the weights, keys and values; with `has_all_forms`, sizes it does not offer too.

        Loading raises InvalidParameterError: without the C++ kernels there are no weights in integers.
        """
        yield "bf16", self.load
        if self.has_blocks and not self.is_dithered:
            yield "the GGUF file's blocks", partial(self.load, in_blocks=True)
        for name in ("int8", "int4"):
            yield name, partial(self.load, quantization=get_quantization(name))
        yield "bf16, keys and values int8", partial(self.load, kv_cache_dtype="int8")
        for name in ("int8", "int4"):
            yield f"{name}, keys and values int8", partial(self.load, "bfloat16", get_quantization(name), "int8")
        if has_all_forms:
            for name, (linear, logits) in FORMS.items():
                quantization = Quantization(name=name, linear=linear, logits=logits)
                yield f"form {name}", partial(self.load, quantization=quantization)


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


def log_probabilities(model: CausalLM, sample: Sample) -> torch.Tensor:
    """Return what the model expects after each token from the last given one on: [T, V] float32."""
    runner = PagedRunner(model, num_blocks=64, block_size=32)
    [logits] = runner.step({0: sample[0]})
    return answered(logits, sample)


def answered(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Return the log-probabilities of the positions that count: [T, V] float32."""
    _, first = sample
    return logits[first - 1 : -1].log_softmax(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a name, folder or file, as for octavo itself")
    parser.add_argument("--dither", action="store_true", help="move weights of a GGUF file off their grid")
    parser.add_argument("--count", type=int, default=40, help="questions of each task, for the demo model")
    parser.add_argument("--all-forms", action="store_true", help="group sizes that Octavo does not offer, too")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of the bundled texts")
    parser.add_argument("--forms", nargs="*", default=[], help="names of rows, such as int4; all by default")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="checkpoints of the same model to measure")
    parser.add_argument("--write-dithered", type=Path, metavar="FOLDER", help="write the dithered model, and no more")
    options = parser.parse_args()
    if options.write_dithered:
        write_dithered(options.model, options.write_dithered)
        return
    is_demo = options.model == "demo"
    kinds = {"answers": list(demo_answers(options.count))} if is_demo else {}
    kinds = kinds or {kind: list(bundled_texts(options.model, kind)) for kind in options.kinds}
    samples = list(chain.from_iterable(kinds.values()))
    subject = Subject(options.model, options.dither)
    plain = subject.load("float32")
    expected = [log_probabilities(plain, sample) for sample in samples]
    report: dict[str, Any] = {}
    header = "".join(f" | {kind}" for kind in kinds)
    print(
        f"| weights | KL divergence, nats{header} | same likeliest token | perplexity |\n|{' --- |' * (4 + len(kinds))}"
    )
    print(f"| float32 | {'| ' * len(kinds)}| | {perplexity(expected, samples):.2f} |", flush=True)
    forms = {name: load for name, load in subject.forms(options.all_forms) if name in (options.forms or [name])}
    forms |= {folder.name: partial(subject.load_beside, folder) for folder in options.beside}
    for name, found in rows(subject, samples, forms):
        report[name] = compare(expected, found) | {"perplexity": perplexity(found, samples)}
        report[name]["kl by kind"] = dict(zip(kinds, divergences_of(kinds, expected, found), strict=True))
        row, by_kind = report[name], "".join(f" | {kl:.5f}" for kl in report[name]["kl by kind"].values())
        print(f"| {name} | {row['kl']:.5f}{by_kind} | {row['agreement']:.2%} | {row['perplexity']:.2f} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def divergences_of(
    kinds: Mapping[str, list[Sample]], expected: list[torch.Tensor], found: list[torch.Tensor]
) -> Iterator[float]:
    """Yield the mean divergence over the positions of each kind."""
    start = 0
    for samples in kinds.values():
        part = slice(start, start := start + len(samples))
        yield compare(expected[part], found[part])["kl"]


def rows(
    subject: Subject, samples: list[Sample], forms: Mapping[str, Callable[[], CausalLM]]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the name of each form, and what it expects in each sample."""
    for name, load in forms.items():
        model = load()
        yield name, [log_probabilities(model, sample) for sample in samples]
    if subject.name != "demo":
        return
    try:
        yield from llama_rows(samples)
    except PeerMissingError as error:
        print(error, file=sys.stderr)


def compare(expected: list[torch.Tensor], found: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean divergence and agreement over all positions."""
    divergences, are_same = [], []
    for plain, quantized in zip(expected, found, strict=True):  # [T, V] each
        divergences.append((plain.double().exp() * (plain.double() - quantized.double())).sum(dim=-1))
        are_same.append(plain.argmax(dim=-1) == quantized.argmax(dim=-1))
    divergence, is_same = torch.cat(divergences), torch.cat(are_same).double()
    return {"kl": float(divergence.mean()), "agreement": float(is_same.mean()), "positions": float(len(is_same))}


def perplexity(found: list[torch.Tensor], samples: list[Sample]) -> float:
    """Return how many equally likely tokens the model's surprise at what came next amounts to."""
    surprises = [
        -logs.gather(1, torch.tensor(tokens[first:])[:, None]).double()  # [T, 1]
        for logs, (tokens, first) in zip(found, samples, strict=True)
    ]
    return float(torch.cat(surprises).mean().exp())


if __name__ == "__main__":
    main()
