"""`octavo inspect MODEL`: what a checkpoint contains and what it would take, without loading it."""

import json as json_codec
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS
from octavo.cli.report import print_table
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.config.model import ModelConfig
from octavo.config.vision import VisionConfig
from octavo.errors import CheckpointError
from octavo.loader.index import StoredTensor, stored_tensors

app = typer.Typer(**TYPER_SETTINGS)
_GGUF_FLOATS = ("F32", "F16", "BF16")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="checkpoint folder, GGUF file, Hub id, `smollm2`, `demo` or `demo-vl`")],
    dtype: Annotated[str, typer.Option("--dtype", help="what memory is computed for", metavar="<str>")] = "auto",
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Architecture, tensors, tokenizer, chat template and memory of a checkpoint, without loading it."""
    path = resolve_model(model)
    config = read_model_config(path, model=model, dtype=dtype)
    stored = list(stored_tensors(path))
    described = facts(path, config, stored)
    if dtype == "auto" and config.dtype == "float16":  # to ask this machine's device would take torch
        described["dtype"] = "float16; computed in bfloat16 on CPUs that have no kernels for float16"
    if json:
        listed = {"tensors": [[each.name, list(each.shape), each.type, each.num_bytes] for each in stored]}
        print(json_codec.dumps(described | (listed if tensors else {})))
        return
    print_table({name: [value] for name, value in described.items()})
    if tensors:
        print_table(
            {each.name: ["x".join(map(str, each.shape)), each.type, size_text(each.num_bytes)] for each in stored}
        )


def facts(path: Path, config: ModelConfig, stored: list[StoredTensor]) -> dict[str, str]:
    """Return the description, by name."""
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} KV heads"
    experts = f", {config.moe.num_experts} experts, {config.moe.top_k} per token" if config.moe else ""
    num_weights, num_bytes = sum(prod(each.shape) for each in stored), _BYTES[config.dtype]
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_bytes
    on_disk = f"{num_weights / 1e6:,.1f} M, {size_text(sum(each.num_bytes for each in stored))} on disk"
    return {
        "model": str(path),
        "architecture": f"{config.architecture}: {config.num_layers} layers of {config.hidden_size}, {heads}{experts}",
        "context": f"{config.max_model_len:,} tokens, {size_text(kv_bytes)} of KV cache each",
        **({"images": _images(config.vision)} if config.vision is not None else {}),
        "vocabulary": f"{config.vocab_size:,} tokens",
        "logits head": "the embedding (tied)" if config.tie_word_embeddings else "its own",
        "chat template": _chat_template(path),
        "tensors": ", ".join(_by_type(stored)),
        "weights": f"{on_disk}; {_computed(config, stored, num_weights * num_bytes)}",
    }


def _computed(config: ModelConfig, stored: list[StoredTensor], dense_bytes: int) -> str:
    """Describe the form in which the weights are computed, and its size; `dense_bytes` is their size as floats."""
    as_floats = f"in {config.dtype} {size_text(dense_bytes)} in memory"
    if config.quantization is None:
        return as_floats
    if config.quantization.method != "gguf":
        size = size_text(sum(each.num_bytes for each in stored))
        return f"quantized: {config.quantization.method}, {size} in memory where there are kernels for it"
    has_head = any(each.name == "output.weight" for each in stored)
    held = [each for each in stored if not has_head or each.name != "token_embd.weight"]  # rows are read from the file
    of_float = _BYTES[config.dtype]
    num_bytes = sum(prod(each.shape) * of_float if each.type in _GGUF_FLOATS else each.num_bytes for each in held)
    return f"computed in these blocks on a CPU, {size_text(num_bytes)} in memory; elsewhere {as_floats}"


def _images(vision: VisionConfig) -> str:
    side = vision.patch_size * vision.spatial_merge_size
    tower = f"{vision.num_layers} layers of {vision.hidden_size}, {vision.num_heads} heads"
    if vision.fixed_grid is None:
        return f"{tower}; a token for each {side} x {side} pixels"
    return (
        f"{tower}; {vision.num_tokens(vision.fixed_grid)} tokens for {vision.image_size} x {vision.image_size} pixels"
    )


def _by_type(stored: list[StoredTensor]) -> Iterator[str]:
    counts, sizes = Counter(each.type for each in stored), Counter[str]()
    for each in stored:
        sizes[each.type] += each.num_bytes
    for name, count in counts.most_common():
        yield f"{count} {name} ({size_text(sizes[name])})"


def _chat_template(path: Path) -> str:
    from octavo.tokenizer.tokenizer import Tokenizer

    try:
        template = Tokenizer.from_path(path).chat_template
    except CheckpointError as error:
        return f"unknown: {error}"
    return "none" if template is None else f"{len(template.source):,} characters"


def size_text(num_bytes: int) -> str:
    """Format a number of bytes."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
