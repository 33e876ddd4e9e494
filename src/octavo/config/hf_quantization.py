"""Reads `quantization_config` from `config.json`: which known format a checkpoint's weights have."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from octavo.config.json_fields import JsonFields
from octavo.config.model import CheckpointQuantization, DType, ModelConfig, QuantizationName
from octavo.errors import InvalidParameterError, UnsupportedModelError

# Supported by schemes in `layers/quant/base.py`.
QUANTIZATION_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4", "octavo")
METHODS_WITH_BLOCKS = ("gguf", "mxfp4")
# Keys that `config/gguf.py` adds: types of quantized tensors by layer, and sampling parameters.
GGUF_TYPES, GGUF_SAMPLING = "gguf_types", "gguf_sampling"
DTYPES_WITH_BLOCKS: tuple[DType, ...] = ("bfloat16", "float16")  # float32: blocks are dequantized at load
# By the file's name: what wrote it, and a key that it has.
_SEPARATE_FILES = MappingProxyType({"quantize_config.json": ("gptq", "bits"), "quant_config.json": ("awq", "w_bit")})
_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name


def read_quantization(fields: JsonFields, dtype: DType) -> CheckpointQuantization | None:
    """Return the format of the weights; None: dense, or blocks that this dtype does not compute with."""
    if GGUF_TYPES in fields:
        types = fields.nested(GGUF_TYPES)
        is_computed = types.values and dtype in DTYPES_WITH_BLOCKS
        return CheckpointQuantization(method="gguf", origin=types.origin, values=types.values) if is_computed else None
    key = next((key for key in _KEYS if fields.nested(key).values), None)
    if key is None:
        return None
    settings = fields.nested(key)
    method = settings.text("quant_method", "compressed-tensors" if key == _KEYS[1] else None)
    if method not in QUANTIZATION_METHODS:
        known = ", ".join(QUANTIZATION_METHODS)
        raise UnsupportedModelError(
            f"{settings.origin}: quant_method={method!r} is not supported; supported: {known}. Use a version of the "
            "model in one of these or as GGUF, or the original with --quantization int8 or int4"
        )
    if method in METHODS_WITH_BLOCKS and dtype not in DTYPES_WITH_BLOCKS:
        return None
    return CheckpointQuantization(method=method, origin=settings.origin, values=settings.values)


def with_separate_quantization(fields: JsonFields, folder: Path) -> JsonFields:
    """Return the keys of `config.json` with those that AutoGPTQ and older AutoAWQ write to a file of their own."""
    if any(key in fields for key in _KEYS):
        return fields
    for file_name, (method, bits) in _SEPARATE_FILES.items():
        if (folder / file_name).is_file() and bits in (own := JsonFields.read(folder / file_name)):
            return fields.with_defaults({_KEYS[0]: {"quant_method": method, **own.values}})
    return fields


def resolve_quantization(
    asked: QuantizationName | None, model: ModelConfig, path: Path
) -> tuple[QuantizationName | None, ModelConfig]:
    """Return `quantization=` and the model as they are to be computed.

    Blocks of GGUF files and of MXFP4 may be dequantized, and quantized in another way, as may 8-bit floats. Raises
    InvalidParameterError: the option does not fit this model.
    """
    if asked is None:
        return None, model
    stored = model.quantization
    if stored is not None and stored.method not in METHODS_WITH_BLOCKS:
        groups = stored.fields.nested("config_groups")
        kinds = {groups.nested(key).nested("weights").values.get("type") for key in groups.values}
        has_floats = stored.method in ("fbgemm_fp8", "fp8") or kinds == {"float"}  # of 8 bits each
        if has_floats and asked not in ("gguf", "dequantize"):
            return asked, model
        limit = f"unset: the weights of {model.model} are quantized already (quant_method {stored.method})"
        raise InvalidParameterError("quantization", asked, limit)
    if asked == "gguf" and (stored is None or stored.method != "gguf"):
        limit = f"needs a GGUF file with quantized tensors, and dtype {' or '.join(DTYPES_WITH_BLOCKS)}; here it is "
        raise InvalidParameterError("quantization", asked, f"{limit}{path.name} in {model.dtype}")
    if asked == "dequantize" and stored is None and not (path.is_file() or _has_blocks(path)):
        raise InvalidParameterError("quantization", asked, f"is for GGUF files and MXFP4; {path} has no such blocks")
    if asked == "gguf":
        return asked, model
    return None if asked == "dequantize" else asked, replace(model, quantization=None)


def _has_blocks(folder: Path) -> bool:
    """Return whether a checkpoint has weights in blocks, in whatever dtype it is to be computed."""
    settings = JsonFields.read(folder / "config.json").nested(_KEYS[0])
    return settings.values.get("quant_method") in METHODS_WITH_BLOCKS
