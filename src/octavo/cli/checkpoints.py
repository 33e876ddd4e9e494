"""`octavo inspect`, `convert` and `lora inspect`: what is in checkpoints and adapters, checkpoints in other formats."""

import json as json_codec
import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.inspection import checkpoint_facts, size_text
from octavo.cli.options import TYPER_SETTINGS, with_derived_flags
from octavo.cli.terminal import print_facts, print_table
from octavo.config.engine import LoadFormat
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_adapter, resolve_model
from octavo.config.option_types import option
from octavo.device.process import limit_spinning
from octavo.errors import InvalidParameterError
from octavo.loader.stored_tensors import stored_tensors

if TYPE_CHECKING:
    from octavo.lora.files import AdapterConfig

_SOURCE = "checkpoint folder, GGUF file, Hub id, `smollm2`, `demo` or `demo-vl`"

lora = typer.Typer(**TYPER_SETTINGS)


def inspect(
    model: Annotated[str, typer.Argument(help=_SOURCE)],
    dtype: Annotated[str, typer.Option("--dtype", help="what memory is computed for", metavar="<str>")] = "auto",
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What a checkpoint is and takes, without loading it; of one that does not run here, why, and what would."""
    path = resolve_model(model)
    stored = list(stored_tensors(path))
    facts = checkpoint_facts(path, stored, model=model, dtype=dtype)
    if json and tensors:
        listed = [[each.name, list(each.shape), each.type, each.num_bytes] for each in stored]
        print(json_codec.dumps({**facts, "tensors": listed}))
        return
    print_facts(facts, as_json=json)
    if tensors:
        print_table(
            {each.name: ["x".join(map(str, each.shape)), each.type, size_text(each.num_bytes)] for each in stored}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """Formats of source and target, and changes of the weights.

    Raises InvalidParameterError: an option of `quantize` without it.
    """

    to: str = option("safetensors", "format to write: safetensors, pt, gguf, tensorizer or sharded_state")
    dtype: str = option("auto", "dtype of the weights; auto: unchanged, bfloat16 for GGUF blocks")
    load_format: LoadFormat = option("auto", "format of the source; auto: detect it")
    revision: str | None = option(None, "branch, tag or commit of a Hub model")
    max_shard_gib: float | None = option(
        None, "maximum GiB of weights in one file; not for gguf and tensorizer [default: 2]"
    )
    gguf_type: str | None = option(None, "type of a GGUF file's matrices, such as Q8_0 [default: --dtype]")
    tensor_parallel_size: int | None = option(None, "number of ranks that a sharded_state is for [default: 1]")
    merge_lora: str | None = option(None, "LoRA adapter to merge into the weights")
    quantize: str | None = option(None, "int4: round linear layers to 4 bits, calibrated on a text")
    bits_for: str = option("", "bits of single layers, such as down_proj=8,lm_head=8")
    calibration_text: str | None = option(None, "text like the model's inputs; default: a bundled one")

    def __post_init__(self) -> None:
        for name in ("bits_for", "calibration_text"):
            if (value := getattr(self, name)) and self.quantize is None:
                raise InvalidParameterError(name, value, "only with --quantize")


@with_derived_flags
def convert(
    source: Annotated[str, typer.Argument(help=_SOURCE)],
    out: Annotated[Path, typer.Argument(help="folder to create; for gguf, a file")],
    *,
    options: ConvertOptions,
) -> None:
    """Write a model as a checkpoint of another format: weights, settings, tokenizer and chat template."""
    limit_spinning()  # before torch is imported: calibration has its own threads alongside torch's
    from octavo.calibration.quantize import quantized
    from octavo.convert import run
    from octavo.convert.merged import merge_lora
    from octavo.convert.source import Checkpoint, TargetOptions

    start_s, shard_gib = time.perf_counter(), options.max_shard_gib
    target = TargetOptions(
        max_shard_bytes=None if shard_gib is None else int(shard_gib * 2**30),
        tensor_parallel_size=options.tensor_parallel_size,
        gguf_type=options.gguf_type,
    )
    checkpoint = Checkpoint.open(
        source, resolve_model(source, options.revision), load_format=options.load_format, dtype=options.dtype
    )
    notes = [options.to]
    if options.merge_lora is not None or options.quantize is not None:
        run.check(out, options.to)  # before a minute of work
    if options.merge_lora is not None:
        checkpoint = merge_lora(checkpoint, resolve_adapter(options.merge_lora))
        notes.append(f"with {options.merge_lora} merged")
    if options.quantize is not None:
        text = None if options.calibration_text is None else Path(options.calibration_text)
        checkpoint = quantized(checkpoint, options.quantize, options.bits_for, text)
        notes.append(f"{checkpoint.bits_per_weight:.2f} bits per quantized weight")
    num_bytes = run.convert(checkpoint, out, options.to, target)
    print(f"{out}: {', '.join(notes)}, {num_bytes / 1e6:,.1f} MB, {time.perf_counter() - start_s:.1f} s")


@lora.callback()
def _lora() -> None:
    """Tools for LoRA adapters."""


@lora.command("inspect")
def inspect_adapter(
    adapter: Annotated[str, typer.Argument(help="folder of a PEFT adapter, or `demo-json`, the bundled one")],
    model: Annotated[
        str | None, typer.Option("--model", help="also check every tensor against this model", metavar="<str>")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Kind, ranks, modules, size and identity of an adapter; names the setting or tensor that is not supported."""
    from octavo.lora.files import read_adapter_config

    folder = resolve_adapter(adapter)
    facts = _adapter_facts(folder, read_adapter_config(folder))
    if model is not None:
        from octavo.convert.merged import check_adapter

        check_adapter(read_model_config(resolve_model(model), model=model), folder)
        facts["fits"] = model
    print_facts(facts, as_json=json)


def _adapter_facts(folder: Path, config: "AdapterConfig") -> dict[str, str]:
    from octavo.lora.files import SAFETENSORS_FILE, content_hash, parse_tensor_name, weights_file

    ranks = sorted({config.rank, *config.rank_pattern.values()})
    kind = "LoRA, rank-stabilized" if config.uses_rslora else "LoRA"
    file = weights_file(folder)
    facts = {
        "adapter": str(folder),
        "kind": f"{kind}, rank {', '.join(map(str, ranks))}, alpha {config.alpha:g}",
        "largest rank": str(config.largest_rank),
        "on disk": f"{file.name}, {size_text(file.stat().st_size)}",
        "content hash": content_hash(folder),
    }
    if config.modules_to_save:
        facts["replaces"] = ", ".join(config.modules_to_save)
    if file.name == SAFETENSORS_FILE:
        stored = list(stored_tensors(folder))
        modules = {parse_tensor_name(each.name)[0] for each in stored}
        kinds = Counter(module.rpartition(".")[2] for module in modules)
        facts["modules"] = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        facts["weights"] = f"{sum(prod(each.shape) for each in stored):,} in {len(stored)} tensors"
    return facts
