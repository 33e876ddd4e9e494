"""What `octavo inspect` says of a checkpoint: what it is, what layers keep, what it takes, or why it does not run."""

from collections import Counter
from math import prod
from pathlib import Path

from octavo.config.checkpoint_files import HeaderEntry
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import METHODS_WITH_BLOCKS
from octavo.config.json_fields import JsonFields
from octavo.config.layers import AttentionSpec, Mixer, RecurrentSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, UnsupportedModelError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONTEXTS = (1024, 8192)  # tokens, whose memory is told beside that of the longest


def checkpoint_facts(path: Path, stored: list[HeaderEntry], *, model: str, dtype: str) -> dict[str, str]:
    """Return what is known of the checkpoint at `path` with these tensors, by name.

    Raises CheckpointError: its files are missing, malformed or inconsistent.
    """
    try:
        config = read_model_config(path, model=model, dtype=dtype)
    except UnsupportedModelError as error:
        facts = {"model": str(path), "architecture": _stated_architecture(path), "runs here": f"no: {error}"}
        return {**facts, **_template_facts(path), **_tensor_facts(stored)}
    facts = _model_facts(path, config, stored)
    if dtype == "auto" and config.dtype == "float16":  # to ask this machine's device would take torch
        facts["dtype"] = "float16; computed in bfloat16 on CPUs that have no kernels for float16"
    return facts


def _stated_architecture(path: Path) -> str:
    if path.is_file():
        from octavo.gguf.file import GgufFile

        return GgufFile.read(path).architecture
    values = JsonFields.read(path / "config.json").values
    names = values.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else str(values.get("model_type", "unknown"))


def _heads_text(spec: AttentionSpec) -> str:
    if (latent := spec.latent) is not None:
        size = latent.key_size + latent.rotary_size
        return f"{spec.num_heads} heads of {size}, one latent vector of {latent.size}"
    return f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} KV heads"


def _kv_values(spec: AttentionSpec) -> int:
    """Return the numbers that a layer caches of a token."""
    return 2 * spec.num_kv_heads * spec.head_dim if spec.latent is None else spec.latent.size


def _model_facts(path: Path, config: ModelConfig, stored: list[HeaderEntry]) -> dict[str, str]:
    heads = [" or ".join(dict.fromkeys(map(_heads_text, config.attending)))] if config.attending else []
    layers = f"{config.num_layers} layers of {config.hidden_size}"
    spec = config.experts
    experts = "" if spec is None else f", {spec.num_experts} experts, {spec.top_k} per token"
    num_weights, num_bytes = sum(map(_num_weights, stored)), _BYTES[config.dtype]
    tensors = _tensor_facts(stored)
    return {
        "model": str(path),
        "architecture": f"{config.architecture}: {', '.join([layers, *heads])}{experts}",
        "computed by": "transformers' own code" if config.impl == "transformers" else "Octavo's own code",
        **_context_facts(config),
        **_image_facts(config),
        **_pooling_facts(config),
        "vocabulary": f"{config.vocab_size:,} tokens",
        "logits head": _head_text(config),
        **_template_facts(path),
        **tensors,
        "weights": f"{tensors['weights']}; {_computed(config, stored, num_weights * num_bytes)}",
    }


def _context_facts(config: ModelConfig) -> dict[str, str]:
    if config.encoder is not None:
        return {"context": f"{config.max_model_len - 1:,} tokens; an encoder, which keeps none"}
    return {
        "context": f"{config.max_model_len:,} tokens",
        "layers keep": _kept_text(config),
        "memory of a context": ", ".join(_context_texts(config)),
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


def _tensor_facts(stored: list[HeaderEntry]) -> dict[str, str]:
    counts, sizes = Counter(each.type for each in stored), Counter[str]()
    for each in stored:
        sizes[each.type] += each.num_bytes
    by_type = (f"{count} {name} ({size_text(sizes[name])})" for name, count in counts.most_common())
    num_weights = sum(map(_num_weights, stored))
    return {
        "tensors": ", ".join(by_type),
        "weights": f"{num_weights / 1e6:,.1f} M, {size_text(sizes.total())} on disk",
    }


def _kept_text(config: ModelConfig) -> str:
    """Describe what layers keep of a context, by kind in the order of layers."""
    counts = Counter(" and ".join(_kept_by(mixer, config) for mixer in layer.mixers) for layer in config.layers)
    counts["nothing"] += counts.pop("", 0)
    return "; ".join(f"{count} of them {what}" for what, count in counts.items() if count)


def _kept_by(spec: Mixer, config: ModelConfig) -> str:
    if isinstance(spec, RecurrentSpec):
        return f"a state of {size_text(_state_bytes(spec, config))}"
    if spec.shares_kv_of is not None:
        return "nothing of their own"
    each = size_text(_kv_values(spec) * _BYTES[config.dtype])
    what = "a vector" if spec.latent is not None else "keys and values"
    window = spec.sliding_window
    return f"{what} ({each} a token)" + (f" of the last {window:,} tokens" if window is not None else "")


def _state_bytes(spec: RecurrentSpec, config: ModelConfig) -> int:
    of_matrix = 0 if spec.matrix_shape is None else prod(spec.matrix_shape) * _BYTES["float32"]
    return prod(spec.conv_shape) * _BYTES[config.dtype] + of_matrix


def _context_texts(config: ModelConfig) -> list[str]:
    """Say how much memory all layers take for one request of some lengths."""
    full = config.max_model_len
    lengths = [*(length for length in _CONTEXTS if length < full), full]
    return [f"{size_text(context_bytes(config, length))} for {length:,} tokens" for length in lengths]


def context_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes that all layers keep of a context of so many tokens, rounded to no blocks."""
    total = 0
    for spec in (mixer for layer in config.layers for mixer in layer.mixers):
        if isinstance(spec, RecurrentSpec):
            total += _state_bytes(spec, config)
        elif spec.shares_kv_of is None:
            seen = min(num_tokens, spec.sliding_window or num_tokens)
            total += seen * _kv_values(spec) * _BYTES[config.dtype]
    return total


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
    as_floats = f"in {config.dtype} {size_text(dense_bytes)} in memory"
    if config.quantization is None:
        return as_floats
    if config.quantization.method not in METHODS_WITH_BLOCKS:
        size = size_text(sum(each.num_bytes for each in stored))
        return f"quantized: {config.quantization.method}, {size} in memory where there are kernels for it"
    has_head = any(each.name == "output.weight" for each in stored)
    of_float, floats = _BYTES[config.dtype], ("F32", "F16", "BF16")

    def stays_in_file(tensor: HeaderEntry) -> bool:  # an embedding in blocks, of which rows are read
        return has_head and tensor.name == "token_embd.weight" and tensor.type not in floats

    held = [each for each in stored if not stays_in_file(each)]
    num_bytes = sum(prod(each.shape) * of_float if each.type in floats else each.num_bytes for each in held)
    return f"computed in these blocks on a CPU, {size_text(num_bytes)} in memory; elsewhere {as_floats}"


def _template_facts(path: Path) -> dict[str, str]:
    """Return the chat template, the formats of calls and reasoning that it shows, and what the vocabulary shows."""
    from octavo.server.openai.answer_plan import REASONING_SIGNS, TOOL_CALL_SIGNS, detected
    from octavo.tokenizer.infill import Infill
    from octavo.tokenizer.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_path(path)
    except (CheckpointError, UnsupportedModelError) as error:
        return {"chat template": f"unknown: {error}"}
    infill = {"fills in the middle": "yes"} if Infill.of(tokenizer) is not None else {}
    template = tokenizer.chat_template
    if template is None:
        return {"chat template": "none", **infill}
    text = template.source + (template.tool_use_source or "")
    return {
        "chat template": f"{len(template.source):,} characters",
        "tool calls": detected(text, TOOL_CALL_SIGNS),
        "reasoning": detected(text, REASONING_SIGNS),
        **infill,
    }


def size_text(num_bytes: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
