"""Reads the activation of a vision tower."""

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionActivation
from octavo.errors import UnsupportedModelError

_ACTIVATIONS: dict[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}


def read_activation(fields: JsonFields, default: str) -> VisionActivation:
    """Read `hidden_act`.

    Raises:
        UnsupportedModelError: an unknown one.
    """
    name = fields.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"{fields.origin}: hidden_act={name!r} is not supported; known: {known}")
    return _ACTIVATIONS[name]
