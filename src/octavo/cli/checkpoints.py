"""`octavo inspect`, `convert` and `lora inspect`: what is in checkpoints and adapters, checkpoints in other formats."""

import json as json_codec
import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS, with_derived_flags
from octavo.cli.terminal import print_facts, print_table
from octavo.config.checkpoint_files import HeaderEntry
from octavo.config.engine import LoadFormat
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import METHODS_WITH_BLOCKS
from octavo.config.hub import resolve_adapter, resolve_model
from octavo.config.layers import AttentionSpec, RecurrentSpec
from octavo.config.model import ModelConfig
from octavo.config.option_types import option
from octavo.device.process import limit_spinning
from octavo.errors import CheckpointError, InvalidParameterError
from octavo.loader.stored_tensors import stored_tensors

if TYPE_CHECKING:
    from octavo.lora.files import AdapterConfig

_SOURCE = "checkpoint folder, GGUF file, Hub id, `smollm2`, `demo` or `demo-vl`"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

lora = typer.Typer(**TYPER_SETTINGS)


def inspect(
    model: Annotated[str, typer.Argument(help=_SOURCE)],
    dtype: Annotated[str, typer.Option("--dtype", help="what memory is computed for", metavar="<str>")] = "auto",
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Architecture, tensors, tokenizer, chat template and memory of a checkpoint, without loading it."""
    path = resolve_model(model)
    config = read_model_config(path, model=model, dtype=dtype)
    stored = list(stored_tensors(path))
    facts = _model_facts(path, config, stored)
    if dtype == "auto" and config.dtype == "float16":  # to ask this machine's device would take torch
        facts["dtype"] = "float16; computed in bfloat16 on CPUs that have no kernels for float16"
    if json and tensors:
        listed = [[each.name, list(each.shape), each.type, each.num_bytes] for each in stored]
        print(json_codec.dumps({**facts, "tensors": listed}))
        return
    print_facts(facts, as_json=json)
    if tensors:
        print_table(
            {each.name: ["x".join(map(str, each.shape)), each.type, _size_text(each.num_bytes)] for each in stored}
        )


def _heads_text(spec: AttentionSpec) -> str:
    if (latent := spec.latent) is not None:
        size = latent.key_size + latent.rotary_size
        return f"{spec.num_heads} heads of {size}, one latent vector of {latent.size}"
    return f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} KV heads"


def _kv_values(spec: AttentionSpec) -> int:
    """Return the numbers that a layer caches of a token."""
    return 2 * spec.num_kv_heads * spec.head_dim if spec.latent is None else spec.latent.size


def _state_bytes(spec: RecurrentSpec, num_bytes: int) -> int:
    """Return the bytes of a layer's state: of the convolution in the model's dtype, of the recurrence in float32."""
    return prod(spec.conv_shape) * num_bytes + (4 * prod(spec.matrix_shape) if spec.matrix_shape else 0)


def _model_facts(path: Path, config: ModelConfig, stored: list[HeaderEntry]) -> dict[str, str]:
    heads = [" or ".join(dict.fromkeys(map(_heads_text, config.attending)))] if config.attending else []
    layers = f"{config.num_layers} layers of {config.hidden_size}"
    spec = config.experts
    experts = "" if spec is None else f", {spec.num_experts} experts, {spec.top_k} per token"
    num_weights, num_bytes = sum(map(_num_weights, stored)), _BYTES[config.dtype]
    owners = [each for each in config.attending if each.shares_kv_of is None]
    kv_bytes = sum(map(_kv_values, owners)) * num_bytes
    state_bytes = sum(_state_bytes(mixer, num_bytes) for mixer in config.mixers if isinstance(mixer, RecurrentSpec))
    states = f", and {_size_text(state_bytes)} of states a request" if state_bytes else ""
    counts, sizes = Counter(each.type for each in stored), Counter[str]()
    for each in stored:
        sizes[each.type] += each.num_bytes
    on_disk = f"{num_weights / 1e6:,.1f} M, {_size_text(sizes.total())} on disk"
    return {
        "model": str(path),
        "architecture": f"{config.architecture}: {', '.join([layers, *heads])}{experts}",
        **({"computed by": "transformers' own code, on one rank"} if config.impl == "transformers" else {}),
        "context": f"{config.max_model_len:,} tokens, {_size_text(kv_bytes)} of KV cache each{states}"
        if config.encoder is None
        else f"{config.max_model_len - 1:,} tokens; an encoder, which keeps none",
        **_image_facts(config),
        **_pooling_facts(config),
        "vocabulary": f"{config.vocab_size:,} tokens",
        "logits head": _head_text(config),
        "chat template": _chat_template(path),
        "tensors": ", ".join(f"{count} {name} ({_size_text(sizes[name])})" for name, count in counts.most_common()),
        "weights": f"{on_disk}; {_computed(config, stored, num_weights * num_bytes)}",
    }


def _head_text(config: ModelConfig) -> str:
    if not config.has_head:
        return "none: it makes vectors"
    return "the embedding (tied)" if config.tie_word_embeddings else "its own"


def _pooling_facts(config: ModelConfig) -> dict[str, str]:
    pooling = config.pooling
    if not pooling.is_stated:
        return {}
    if pooling.num_scores or pooling.ranks:
        what = f"a classifier of {pooling.num_scores} outputs" if pooling.num_scores else "yes or no as the next token"
        return {"scores": what}
    length = ", of length 1" if pooling.normalizes else ""
    return {"vectors": f"{config.vector_size} numbers, pooling {pooling.kind}{length}"}


def _num_weights(tensor: HeaderEntry) -> int:
    """Return how many weights a tensor holds: of MXFP4, two in a byte of blocks, and none in scales."""
    if tensor.type not in ("U8", "uint8") or not tensor.name.endswith(("_proj_blocks", "_proj_scales")):
        return prod(tensor.shape)
    return 2 * prod(tensor.shape) if tensor.name.endswith("_blocks") else 0


def _image_facts(config: ModelConfig) -> dict[str, str]:
    vision = config.vision
    if vision is None:
        return {}
    side, size = vision.patch_size * vision.spatial_merge_size, vision.image_size
    tokens = f"a token for each {side} x {side} pixels"
    if vision.fixed_grid is not None:
        tokens = f"{vision.num_tokens(vision.fixed_grid)} tokens for {size} x {size} pixels"
    tower = f"{vision.num_layers} layers of {vision.hidden_size}, {vision.num_heads} heads"
    return {"images": f"{tower}; {tokens}"}


def _computed(config: ModelConfig, stored: list[HeaderEntry], dense_bytes: int) -> str:
    """Describe the form in which the weights are computed, and its size; `dense_bytes` is their size as floats."""
    as_floats = f"in {config.dtype} {_size_text(dense_bytes)} in memory"
    if config.quantization is None:
        return as_floats
    if config.quantization.method not in METHODS_WITH_BLOCKS:
        size = _size_text(sum(each.num_bytes for each in stored))
        return f"quantized: {config.quantization.method}, {size} in memory where there are kernels for it"
    has_head = any(each.name == "output.weight" for each in stored)
    held = [each for each in stored if not has_head or each.name != "token_embd.weight"]  # rows are read from the file
    of_float, floats = _BYTES[config.dtype], ("F32", "F16", "BF16")
    num_bytes = sum(prod(each.shape) * of_float if each.type in floats else each.num_bytes for each in held)
    return f"computed in these blocks on a CPU, {_size_text(num_bytes)} in memory; elsewhere {as_floats}"


def _chat_template(path: Path) -> str:
    from octavo.tokenizer.tokenizer import Tokenizer

    try:
        template = Tokenizer.from_path(path).chat_template
    except CheckpointError as error:
        return f"unknown: {error}"
    return "none" if template is None else f"{len(template.source):,} characters"


def _size_text(num_bytes: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


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
        "on disk": f"{file.name}, {_size_text(file.stat().st_size)}",
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
