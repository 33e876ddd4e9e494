"""`octavo convert SOURCE OUT`: writes a model as a checkpoint of another format."""

import time
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS
from octavo.config.engine import LoadFormat
from octavo.config.hub import resolve_adapter
from octavo.device.threads import limit_spinning
from octavo.errors import InvalidParameterError

app = typer.Typer(**TYPER_SETTINGS)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="checkpoint folder, GGUF file, Hub id, `smollm2`, `demo` or `demo-vl`")],
    out: Annotated[Path, typer.Argument(help="folder to create; of gguf, the file")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="format to write: safetensors, pt, gguf, tensorizer or sharded_state", metavar="<str>"
        ),
    ] = "safetensors",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="dtype of the weights; auto: as they are, of GGUF blocks bfloat16", metavar="<str>"
        ),
    ] = "auto",
    load_format: Annotated[
        LoadFormat, typer.Option("--load-format", help="format of the source; auto: as it is")
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option("--revision", help="branch, tag or commit of a Hub model", metavar="<str>")
    ] = None,
    max_shard_gib: Annotated[
        float | None,
        typer.Option(
            "--max-shard-gib", help="maximum GiB of weights in one file; not of gguf and tensorizer [default: 2]"
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
        str | None, typer.Option("--merge-lora", help="add a LoRA adapter to the weights: its folder", metavar="<str>")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", help="int4: round linear layers to 4 bits, calibrated on a text", metavar="<str>"),
    ] = None,
    bits_for: Annotated[
        str,
        typer.Option("--bits-for", help="layers with other bits, such as down_proj=8,lm_head=8", metavar="<str>"),
    ] = "",
    calibration_text: Annotated[
        Path | None, typer.Option("--calibration-text", help="text like the model's own use; default: a bundled one")
    ] = None,
) -> None:
    """Write a model as a checkpoint of another format: weights, settings, tokenizer and chat template."""
    limit_spinning()  # before torch is imported: calibration has threads of its own alongside torch's
    from octavo.calibration.request import quantized
    from octavo.convert import run
    from octavo.convert.merged import merge_lora as merge_lora_into
    from octavo.convert.source import Checkpoint
    from octavo.convert.targets import TargetOptions

    start_s = time.perf_counter()
    options = TargetOptions(
        max_shard_bytes=None if max_shard_gib is None else int(max_shard_gib * 2**30),
        tensor_parallel_size=tensor_parallel_size,
        gguf_type=gguf_type,
    )
    checkpoint = Checkpoint.open(source, revision=revision, load_format=load_format, dtype=dtype)
    detail = to
    if merge_lora is not None:
        run.check(out, to)
        checkpoint = merge_lora_into(checkpoint, resolve_adapter(merge_lora))
        detail += f", with {merge_lora} merged"
    if quantize is not None:
        run.check(out, to)  # before a minute of work
        checkpoint = quantized(checkpoint, quantize, bits_for, calibration_text)
        detail += f", {checkpoint.bits_per_weight:.2f} bits per quantized weight"
    elif bits_for or calibration_text is not None:
        name, value = ("bits_for", bits_for) if bits_for else ("calibration_text", str(calibration_text))
        raise InvalidParameterError(name, value, "only with --quantize")
    num_bytes = run.convert(checkpoint, out, to, options)
    print(f"{out}: {detail}, {num_bytes / 1e6:,.1f} MB, {time.perf_counter() - start_s:.1f} s")
