"""Reads `quantization_config` from `config.json`: which known format a checkpoint's weights have."""

from octavo.config.json_fields import JsonFields
from octavo.config.model import CheckpointQuantization
from octavo.errors import UnsupportedModelError

# Supported by schemes in `layers/quant/registry.py`.
QUANTIZATION_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "octavo")
_FLOATS = ("fbgemm_fp8", "fp8")
_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name


def read_quantization(fields: JsonFields) -> CheckpointQuantization | None:
    """Return the format of the weights; None: dense.

    Raises:
        UnsupportedModelError: an unsupported format; the message lists the supported ones.
    """
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
    return CheckpointQuantization(method=method, origin=settings.origin, values=settings.values)


def has_float_weights(checkpoint: CheckpointQuantization) -> bool:
    """Return whether all quantized weights are 8-bit floats, which `quantization=` can quantize again."""
    if checkpoint.method in _FLOATS:
        return True
    groups = checkpoint.fields.nested("config_groups")
    kinds = [groups.nested(key).nested("weights").values.get("type") for key in groups.values]
    return bool(kinds) and set(kinds) == {"float"}
