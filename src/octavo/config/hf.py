"""Parses a checkpoint's `config.json` into a `ModelConfig`, without torch or transformers.

A checkpoint is read as its authors meant it or rejected: any unsupported setting that would change the result is an
error that names the file, the key and the value.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

from octavo.config import families
from octavo.config.checkpoint_files import has_own_head, lacks_head
from octavo.config.encoders import encoder_config
from octavo.config.fallback import HINT, fallback_family, may_be_known, way_out
from octavo.config.family import Family
from octavo.config.hf_images import text_part
from octavo.config.hf_layers import max_supported_len, read_layers
from octavo.config.hf_quantization import GGUF_SAMPLING, read_quantization, with_separate_quantization
from octavo.config.json_fields import JsonFields
from octavo.config.layers import RopeConfig
from octavo.config.model import DType, GenerationDefaults, ModelConfig, NormPlacement, PoolerName, TokenInputs
from octavo.config.pooling import gguf_pooling, read_pooling, resolve_pooling, trained_dimensions
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Keys that change the result if set (neither null, false nor empty) and that Octavo does not support.
_REFUSED_KEYS = ("use_mrope", "add_cross_attention", "is_encoder_decoder")
# Classes around a model, of PEFT, torch.compile and TRL, that training may leave as the name of its architecture.
_WRAPPERS = frozenset(
    {
        *("PeftModel", "PeftModelForCausalLM", "PeftMixedModel", "OptimizedModule", "DistributedDataParallel"),
        *("AutoModelForCausalLM", "AutoModelForCausalLMWithValueHead"),
    }
)
# Parameters of sampling in `generation_config.json`: those without effect if `do_sample` is false, then the others.
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p")}
_OTHERS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
# By an architecture's activation: the key that names it, and the names that it may have.
_ACTIVATIONS = MappingProxyType(
    {
        "silu": ("hidden_act", "silu", "swish"),
        "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
        "relu2": ("hidden_act", "relu2"),
        "plain_gelu": ("hidden_act", "gelu_pytorch_tanh", "gelu_new"),
    }
)


def read_model_config(
    path: Path,
    *,
    model: str,
    dtype: str = "auto",
    max_model_len: int | None = None,
    model_impl: str = "auto",
    pooler: PoolerName = "auto",
) -> ModelConfig:
    """Read the checkpoint in folder `path`, or in the GGUF file `path`; `model` is the name the user gave.

    `dtype` "auto" uses the checkpoint's own; `max_model_len` None uses the maximum that the checkpoint supports. Head
    and embedding are tied if the configuration says so and the files have no other head. `model_impl` "transformers"
    has the installed library's own code compute the model, "auto" only one that Octavo does not compute as configured.
    `pooler` says how vectors are made, whatever files say; "auto" leaves it to them. Raises
    CheckpointError: `config.json` or `generation_config.json` is missing, malformed or inconsistent.
    UnsupportedModelError: valid, but with an architecture or a setting that Octavo does not support.
    InvalidParameterError: `max_model_len` exceeds what the checkpoint supports.
    """
    fields = read_config_fields(path)
    options = {"model": model, "dtype": dtype, "max_model_len": max_model_len}
    fields, config = _read_either(fields, path, model_impl, options)
    known = families.FAMILIES.get(config.architecture)
    sizes = trained_dimensions(fields, None if known is None else known.vector_sizes)
    read = gguf_pooling(fields) if path.is_file() else read_pooling(path)
    stated = config.pooling if config.pooling.is_stated else read
    if config.encoder is not None and stated is not None and stated.ranks:
        raise UnsupportedModelError(f"{path}: a classifier in a GGUF file; load the model from a folder")
    pooling = resolve_pooling(stated, pooler, sizes, config.hidden_size)
    if pooling is not None:
        config = replace(config, pooling=replace(pooling, is_stated=True))
    if config.encoder is not None:
        return config
    is_tied = config.tie_word_embeddings and (path.is_file() or not has_own_head(path))
    has_head = is_tied or path.is_file() or not (config.pooling.is_stated and lacks_head(path))
    if not (has_head or not config.pooling.ranks):
        raise UnsupportedModelError(f"{path}: it ranks by its next token, but has no lm_head")
    return replace(config, tie_word_embeddings=is_tied or not has_head, has_head=has_head)


def _read_either(
    fields: JsonFields, path: Path, model_impl: str, options: Mapping[str, Any]
) -> tuple[JsonFields, ModelConfig]:
    """Return the model as Octavo computes it, or else as transformers' code does, with the keys that it has."""
    refusal = None
    if path.is_file() or model_impl != "transformers":
        try:
            return fields, model_config_of(fields, path, **options)
        except UnsupportedModelError as error:
            if path.is_file() or model_impl != "auto":
                raise
            if find_spec("transformers") is None:
                raise UnsupportedModelError(f"{error}; {HINT}") from None
            if not may_be_known(fields):
                raise
            refusal = error
    try:
        fields, family = fallback_family(fields, path)
    except UnsupportedModelError as error:
        raise (
            error if refusal is None else UnsupportedModelError(f"{refusal}; {str(error).removeprefix(f'{path}: ')}")
        ) from None
    why = "model_impl='transformers'" if refusal is None else str(refusal)
    logger.warning("%s: computed by transformers' own code: slower, without promises of same bytes: %s", path, why)
    return fields, replace(_config_of(fields, family, path, **options), impl="transformers")


def model_config_of(
    fields: JsonFields, path: Path, *, model: str, dtype: str = "auto", max_model_len: int | None = None
) -> ModelConfig:
    """Do so with the keys of `config.json` in `fields`."""
    family = find_family(fields)
    if family.causal is not None and not fields.values.get("use_bidirectional_attention"):
        family = families.FAMILIES[family.causal]
    return _config_of(fields, family, path, model=model, dtype=dtype, max_model_len=max_model_len)


def _config_of(
    fields: JsonFields, family: Family, path: Path, *, model: str, dtype: str, max_model_len: int | None
) -> ModelConfig:
    whole = fields
    architecture, read_tower = family.name, family.read_tower
    if read_tower is not None or family.is_nested:
        fields, family = text_part(whole, family, families.FAMILIES)
    own = {usual: fields.values[key] for key, usual in family.usual_keys.items() if key in fields}
    fields = JsonFields(fields.origin, {**fields.values, **dict.fromkeys(fields.nulls), **own})
    fields = fields.with_defaults(family.defaults)
    for key in _REFUSED_KEYS:
        if fields.values.get(key):
            raise fields.unsupported(key)
    if family.read_encoder is not None:
        kind = _dtype(fields, dtype)
        return encoder_config(
            fields,
            family,
            model=model,
            path=str(path),
            dtype=kind,
            max_model_len=max_model_len,
            quantization=read_quantization(fields, kind),
        )
    key, *activations = _ACTIVATIONS[family.activation]
    if fields.text(key, activations[0]) not in activations:
        raise fields.unsupported(key, f"; known: {activations[0]}")
    max_position_embeddings = fields.integer("max_position_embeddings")
    layers, rotary = (family.read_layers or read_layers)(fields, family, max_position_embeddings)
    soft_cap_key = "final_logit_softcapping"
    file = path / "generation_config.json"
    generation = JsonFields.read(file) if file.exists() else JsonFields(str(file), {})
    config = ModelConfig(
        model=model,
        path=str(path),
        architecture=architecture,
        dtype=_dtype(fields, dtype),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        rotary=rotary,
        max_position_embeddings=max_position_embeddings,
        max_model_len=_max_model_len(
            max_model_len, rotary[0].rope if rotary else RopeConfig(), max_position_embeddings, family
        ),
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        norm_offset=family.norm_offset,
        post_norm_eps=fields.number(family.post_norm_eps_key) if family.post_norm_eps_key else None,
        norms=_norms(fields, family),
        norm_kind=family.norm_kind,
        embedding_scale=_embedding_scale(fields, family),
        rounds_embedding_scale=family.scales_embedding,
        residual_scale=fields.number("residual_multiplier", 1.0) if family.has_multipliers else 1.0,
        logits_scale=_logits_scale(fields, family),
        activation=family.activation,
        token_inputs=_token_inputs(fields) if family.has_token_inputs else None,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        logits_soft_cap=fields.number(soft_cap_key) if soft_cap_key in fields else None,
        quantization=read_quantization(fields, _dtype(fields, dtype)),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        generation=_sampling_defaults(fields.nested(GGUF_SAMPLING) if GGUF_SAMPLING in fields else generation),
    )
    return config if read_tower is None else replace(config, vision=read_tower(whole, config.hidden_size))


def read_config_fields(path: Path) -> JsonFields:
    """Return the keys of `config.json`, or those that a GGUF file's metadata stands for."""
    if path.is_file():
        from octavo.config.gguf import read_gguf_fields  # numpy, which no other start needs this early

        return read_gguf_fields(path)
    if not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        base = JsonFields.read(path / "adapter_config.json").values.get("base_model_name_or_path", "its base model")
        raise CheckpointError(f"{path}: an adapter, no model: load {base}, and this as an adapter (docs/lora.md)")
    return with_separate_quantization(JsonFields.read(path / "config.json"), path)


def find_family(fields: JsonFields) -> Family:
    """Look up the family by its name, however cased, or by `model_type` if the file names none, a base class or a
    class that training wraps models in.
    """
    known = families.FAMILIES
    value = fields.values.get("architectures")
    names = [value] if isinstance(value, str) else fields.texts("architectures") if value is not None else []
    named = [name.removeprefix("FSDP") for name in names if name not in _WRAPPERS]
    if not named and "_class_name" in fields:
        raise fields.unsupported("_class_name", ": a part of a pipeline of diffusers; Octavo runs language models")
    by_name = {name.casefold(): family for name, family in known.items()}
    for name in named:
        if name.casefold() in by_name:
            return by_name[name.casefold()]
    kind = fields.text("model_type", "" if named else None)
    by_type = next((family for family in known.values() if family.model_type == kind), None)
    stem = (by_type.name if by_type else "").partition("For")[0]  # of transformers' classes without a logits head
    if by_type is not None and (not named or not {f"{stem}Model", f"{stem}TextModel"}.isdisjoint(named)):
        return by_type
    asked = ", ".join(names) or kind
    raise UnsupportedModelError(
        f"{fields.origin}: architecture {asked!r} is not supported; {way_out(fields, asked, known)}"
    )


def _sampling_defaults(fields: JsonFields) -> GenerationDefaults:
    """Read the default sampling parameters of `generation_config.json` or a GGUF file.

    A value that no request may have does not keep the model from loading: a warning says that it is ignored.
    """
    is_sampled = fields.values.get("do_sample", True)
    if not isinstance(is_sampled, bool):
        logger.warning("%s: do_sample=%r is ignored: true or false is expected", fields.origin, is_sampled)
    names = _OTHERS if is_sampled is False else _SAMPLING | _OTHERS
    values = {name: _usable(fields, key, name) for key, name in names.items() if key in fields}
    return GenerationDefaults(**{name: value for name, value in values.items() if value is not None})


def _usable(fields: JsonFields, key: str, name: str) -> Any:
    """Return a value if a request may have it, else None."""
    value = fields.values[key]
    is_integer = name in ("top_k", "max_tokens")
    if isinstance(value, float) and is_integer and value.is_integer():
        value = int(value)
    try:
        SamplingParams.from_options({name: value})
    except InvalidParameterError as error:
        logger.warning("%s: %s=%r is ignored: %s", fields.origin, key, fields.values[key], error)
        return None
    return value if is_integer else float(value)


def _embedding_scale(fields: JsonFields, family: Family) -> float | None:
    if family.has_multipliers:
        return fields.number("embedding_multiplier", 1.0)
    return float(fields.integer("hidden_size") ** 0.5) if family.scales_embedding else None


def _norms(fields: JsonFields, family: Family) -> NormPlacement:
    if family.parallel_key is not None and fields.flag(family.parallel_key, False):
        return "shared"
    return "before" if fields.values.get("use_sandwich_norm") is False else family.norms


def _logits_scale(fields: JsonFields, family: Family) -> float:
    if family.logits_factor_key is not None:
        return fields.number(family.logits_factor_key)
    if not family.has_multipliers:
        return 1.0
    return fields.number("lm_head_multiplier", 1.0) / fields.number("logits_scaling", 1.0)


def _token_inputs(fields: JsonFields) -> TokenInputs | None:
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    vocab_size = fields.integer("vocab_size_per_layer_input", fields.integer("vocab_size"))
    return TokenInputs(vocab_size, size) if size else None


def _dtype(fields: JsonFields, asked: str) -> DType:
    """Resolve the dtype. Files without one predate the key, when all checkpoints were float32."""
    known = get_args(DType)
    if asked != "auto":
        if asked not in known:
            raise InvalidParameterError("dtype", asked, "one of auto, " + ", ".join(known))
        return cast(DType, asked)
    key = "dtype" if "dtype" in fields else "torch_dtype"
    stated = fields.text(key, "float32").removeprefix("torch.")
    if stated not in known:
        raise fields.fail(key, "unknown dtype; one of " + ", ".join(known) + " is expected, or name one with dtype=")
    return cast(DType, stated)


def _max_model_len(asked: int | None, rope: RopeConfig, max_position_embeddings: int, family: Family) -> int:
    by_rope = max_supported_len(rope, max_position_embeddings)
    limit = max_position_embeddings if family.is_length_scaled else by_rope
    if asked is None:
        return limit
    if asked > limit:
        why = f"at most {limit}, which is what the checkpoint supports (max_position_embeddings"
        why += f" {max_position_embeddings}, rope type {rope.kind})"
        if rope.kind == "dynamic":
            why += "; dynamic scaling beyond that would make results depend on the batch"
        raise InvalidParameterError("max_model_len", asked, why)
    return asked
