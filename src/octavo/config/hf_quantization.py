"""`quantization_config` of a `config.json`: which of the known forms a checkpoint's weights have."""

from octavo.config.json_fields import JsonFields
from octavo.config.model import CheckpointQuantization
from octavo.errors import UnsupportedModelError

# What `layers/quant/registry.py` has schemes for.
QUANTIZATION_METHODS = ("compressed-tensors", "gptq")
_KEYS = ("quantization_config", "compression_config")  # the second is how compressed-tensors once spelt it


def read_quantization(fields: JsonFields) -> CheckpointQuantization | None:
    """Return the form of the weights; None: they are dense.

    Raises:
        UnsupportedModelError: a form that Octavo does not read; the message lists those that it does.
    """
    key = next((key for key in _KEYS if fields.nested(key).values), None)
    if key is None:
        return None
    settings = fields.nested(key)
    method = settings.text("quant_method", "compressed-tensors" if key == _KEYS[1] else None)
    if method not in QUANTIZATION_METHODS:
        known = ", ".join(QUANTIZATION_METHODS)
        raise UnsupportedModelError(f"{settings.origin}: quant_method={method!r} is not supported; supported: {known}")
    return CheckpointQuantization(method=method, origin=settings.origin, values=settings.values)
