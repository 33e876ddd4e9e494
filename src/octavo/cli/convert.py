"""`octavo convert SOURCE OUT`: writes a model as a checkpoint of another format."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS
from octavo.config.engine import LoadFormat
from octavo.config.hub import resolve_adapter
from octavo.device.process import limit_spinning
from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from octavo.convert.source import Checkpoint

app = typer.Typer(**TYPER_SETTINGS)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="checkpoint folder, GGUF file, Hub id, `smollm2`, `demo` or `demo-vl`")],
    out: Annotated[Path, typer.Argument(help="folder to create; for gguf, a file")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="format to write: safetensors, pt, gguf, tensorizer or sharded_state", metavar="<str>"
        ),
    ] = "safetensors",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="dtype of the weights; auto: unchanged, bfloat16 for GGUF blocks", metavar="<str>"
        ),
    ] = "auto",
    load_format: Annotated[
        LoadFormat, typer.Option("--load-format", help="format of the source; auto: detect it")
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option("--revision", help="branch, tag or commit of a Hub model", metavar="<str>")
    ] = None,
    max_shard_gib: Annotated[
        float | None,
        typer.Option(
            "--max-shard-gib", help="maximum GiB of weights in one file; not for gguf and tensorizer [default: 2]"
        ),
    ] = None,
    gguf_type: Annotated[
        str | None,
        typer.Option(
            "--gguf-type", help="type of a GGUF file's matrices, such as Q8_0 [default: --dtype]", metavar="<str>"
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("--tensor-parallel-size", help="number of ranks that a sharded_state is for [default: 1]"),
    ] = None,
    merge_lora: Annotated[
        str | None, typer.Option("--merge-lora", help="LoRA adapter to merge into the weights", metavar="<str>")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", help="int4: round linear layers to 4 bits, calibrated on a text", metavar="<str>"),
    ] = None,
    bits_for: Annotated[
        str,
        typer.Option("--bits-for", help="bits of single layers, such as down_proj=8,lm_head=8", metavar="<str>"),
    ] = "",
    calibration_text: Annotated[
        Path | None, typer.Option("--calibration-text", help="text like the model's inputs; default: a bundled one")
    ] = None,
) -> None:
    """Write a model as a checkpoint of another format: weights, settings, tokenizer and chat template."""
    limit_spinning()  # before torch is imported: calibration has its own threads alongside torch's
    from octavo.convert import run
    from octavo.convert.run import TargetOptions
    from octavo.convert.source import Checkpoint

    start_s = time.perf_counter()
    options = TargetOptions(
        max_shard_bytes=None if max_shard_gib is None else int(max_shard_gib * 2**30),
        tensor_parallel_size=tensor_parallel_size,
        gguf_type=gguf_type,
    )
    changes = Changes(merge_lora, quantize, bits_for, calibration_text)
    checkpoint = Checkpoint.open(source, revision=revision, load_format=load_format, dtype=dtype)
    if changes.any:
        run.check(out, to)  # before a minute of work
    checkpoint, notes = changes.apply(checkpoint)
    num_bytes = run.convert(checkpoint, out, to, options)
    print(f"{out}: {', '.join((to, *notes))}, {num_bytes / 1e6:,.1f} MB, {time.perf_counter() - start_s:.1f} s")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the weights during a conversion.

    Raises:
        InvalidParameterError: an option of `quantize` without it.
    """

    merge_lora: str | None
    quantize: str | None
    bits_for: str
    calibration_text: Path | None

    def __post_init__(self) -> None:
        given = {"bits_for": self.bits_for, "calibration_text": self.calibration_text and str(self.calibration_text)}
        for name, value in given.items():
            if value and self.quantize is None:
                raise InvalidParameterError(name, value, "only with --quantize")

    @property
    def any(self) -> bool:
        return self.merge_lora is not None or self.quantize is not None

    def apply(self, checkpoint: "Checkpoint") -> "tuple[Checkpoint, list[str]]":
        """Return a checkpoint with these changes, and notes about them for the user."""
        from octavo.calibration.quantize import quantized
        from octavo.convert.merged import merge_lora

        notes = []
        if self.merge_lora is not None:
            checkpoint = merge_lora(checkpoint, resolve_adapter(self.merge_lora))
            notes.append(f"with {self.merge_lora} merged")
        if self.quantize is not None:
            checkpoint = quantized(checkpoint, self.quantize, self.bits_for, self.calibration_text)
            notes.append(f"{checkpoint.bits_per_weight:.2f} bits per quantized weight")
        return checkpoint, notes
