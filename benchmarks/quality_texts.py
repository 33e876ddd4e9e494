"""What `benchmarks.quality` reads: texts as tokens, and the weights of a GGUF file without its grid."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from tools.demo_model.corpus import TASKS, held_out
from tools.demo_model.template import question_and_answer

from octavo.config.engine import LoadConfig
from octavo.config.hub import resolve_model
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.gguf.file import GgufTensor
from octavo.kernels.blocks import dequantize, unpack
from octavo.loader.gguf import GgufLoader, tensor_rows
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.worker.memory import empty_model

SEED = 2026
TEXTS = Path(__file__).parent / "texts"
# "mixed": prose, code, languages, tables, 2,300 of SmolLM2's tokens; all others together: 4,800.
KINDS = ("mixed", "news", "dialogue", "code", "russian", "chinese")
_BETWEEN = "\n-----\n"
_MAX_DITHERED_BYTES = 28  # of a block of 32: forms of up to 6 bits; finer grids are no help to int8 either

Sample = tuple[
    list[int], int
]  # tokens, and how many of them are given: positions before the last of these do not count


def bundled_texts(model: str, kind: str) -> Iterator[Sample]:
    """Yield the bundled texts of a kind in a model's tokens; all positions count but the first, which is given."""
    tokenizer = Tokenizer.from_path(resolve_model(model))
    for text in (TEXTS / f"{kind}.txt").read_text(encoding="utf-8").split(_BETWEEN):
        yield tokenizer.encode(text, add_special_tokens=False), 1


def demo_answers(count: int) -> Iterator[Sample]:
    """Yield held-out questions and answers of the demo model's; positions of the answers count."""
    tokenizer = Tokenizer.from_path(resolve_model("demo"))
    for task in TASKS:
        for example in held_out(task, count, SEED):
            question, answer = (
                tokenizer.encode(text, add_special_tokens=False) for text in question_and_answer(example)
            )
            yield question + answer, len(question)


class DitheredGgufLoader(GgufLoader):
    """Moves each weight of the layers at random within half a step of its grid.

    A form of as few bits could otherwise find the very grid that the file was rounded to. Outliers stay.
    """

    def numbers(self, tensor: GgufTensor) -> torch.Tensor:
        is_coarse = tensor.type.block_size == 32 and tensor.type.block_bytes <= _MAX_DITHERED_BYTES
        if not tensor.name.startswith("blk.") or not is_coarse:
            return super().numbers(tensor)
        rows = tensor_rows(tensor)
        values, (_, scales, _) = dequantize(rows, tensor.type), unpack(rows, tensor.type)
        random = torch.Generator().manual_seed(SEED + zlib.crc32(tensor.name.encode()))
        steps = scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)
        return (values + (torch.rand(values.shape, generator=random) - 0.5) * steps).view(tensor.shape)


class _DitheredCheckpoint(Checkpoint):
    """A GGUF file off its grid."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from DitheredGgufLoader(LoadConfig(load_format="gguf", seed=0)).tensors(empty_model(self.model))


def write_dithered(model: str, folder: Path) -> None:
    """Write the dithered weights of a GGUF model to a new folder, in float32, for `octavo convert` to read."""
    source = Checkpoint.open(model, dtype="float32")
    fields = {name: getattr(source, name) for name in ("path", "model", "settings", "load_format", "dtype")}
    convert(_DitheredCheckpoint(**fields), folder, "safetensors", TargetOptions())
