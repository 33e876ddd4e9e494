"""`octavo lora inspect PATH`: what an adapter is, without loading it, and whether it fits a model."""

import json as json_codec
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.inspect import size_text
from octavo.cli.options import TYPER_SETTINGS
from octavo.cli.report import print_table
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_adapter, resolve_model
from octavo.loader.index import stored_tensors
from octavo.lora.files import (
    SAFETENSORS_FILE,
    AdapterConfig,
    content_hash,
    parse_tensor_name,
    read_adapter_config,
    weights_file,
)

app = typer.Typer(**TYPER_SETTINGS)


@app.callback()
def lora() -> None:
    """Tools for LoRA adapters."""


@app.command()
def inspect(
    adapter: Annotated[str, typer.Argument(help="folder of a PEFT adapter, or `demo-json`, the bundled one")],
    model: Annotated[
        str | None, typer.Option("--model", help="also check every tensor against this model", metavar="<str>")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Kind, ranks, modules, size and identity of an adapter; names the setting or tensor that is not supported."""
    folder = resolve_adapter(adapter)
    config = read_adapter_config(folder)
    told = facts(folder, config)
    if model is not None:
        check(folder, model)
        told["fits"] = model
    if json:
        print(json_codec.dumps(told))
    else:
        print_table({name: [value] for name, value in told.items()})


def facts(folder: Path, config: AdapterConfig) -> dict[str, str]:
    """Return the description, by name.

    Raises:
        AdapterError, CheckpointError: about the adapter's files.
    """
    ranks = sorted({config.rank, *config.rank_pattern.values()})
    kind = "LoRA, rank-stabilized" if config.uses_rslora else "LoRA"
    file = weights_file(folder)
    told = {
        "adapter": str(folder),
        "kind": f"{kind}, rank {', '.join(map(str, ranks))}, alpha {config.alpha:g}",
        "largest rank": str(config.largest_rank),
        "on disk": f"{file.name}, {size_text(file.stat().st_size)}",
        "content hash": content_hash(folder),
    }
    if config.modules_to_save:
        told["replaces"] = ", ".join(config.modules_to_save)
    if file.name == SAFETENSORS_FILE:
        stored = list(stored_tensors(folder))
        modules = {parse_tensor_name(each.name)[0] for each in stored}
        kinds = Counter(module.rpartition(".")[2] for module in modules)
        told["modules"] = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        told["weights"] = f"{sum(prod(each.shape) for each in stored):,} in {len(stored)} tensors"
    return told


def check(folder: Path, model: str) -> None:
    """Check an adapter against a model, without the model's weights.

    Raises:
        AdapterError: names the tensor that does not fit.
    """
    from octavo.convert.merged import check_adapter

    check_adapter(read_model_config(resolve_model(model), model=model), folder)
