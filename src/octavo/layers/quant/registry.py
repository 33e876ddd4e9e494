"""Which schemes a model's layers have: those of its checkpoint, or what `quantization=` makes of dense weights."""

from importlib import import_module
from types import MappingProxyType

from octavo.config.model import CheckpointQuantization
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import Kernels
from octavo.kernels.quantization import Float8Format, get_quantization
from octavo.layers.quant.base import MadeAtLoad, Schemes

# quant_method -> module and class, imported when a checkpoint has it; `config/hf_quantization.py` knows the names.
CHECKPOINT_SCHEMES = MappingProxyType(
    {
        "gptq": ("octavo.layers.quant.gptq", "GPTQSchemes"),
        "compressed-tensors": ("octavo.layers.quant.compressed_tensors", "CompressedTensorsSchemes"),
    }
)


def make_schemes(checkpoint: CheckpointQuantization | None, quantization: str | None = None) -> Schemes:
    """Return the schemes of a checkpoint, which are its own, or those of `quantization=`.

    Raises:
        UnsupportedModelError: a setting of the checkpoint's that Octavo does not compute.
        InvalidParameterError: there is no such quantization.
    """
    if checkpoint is None:
        return MadeAtLoad(get_quantization(quantization) if quantization else None)
    module, class_name = CHECKPOINT_SCHEMES[checkpoint.method]
    schemes: Schemes = getattr(import_module(module), class_name)(checkpoint.fields)
    return schemes


def check_made_at_load(schemes: Schemes, kernels: Kernels, where: str) -> None:
    """Hold `quantization=` to what these kernels compute: it is there for speed, which dequantizing would not bring.

    Raises:
        InvalidParameterError: they do not compute with such weights.
    """
    if not isinstance(schemes, MadeAtLoad) or schemes.quantization is None:
        return
    if all(kernels.computes(form) for form in schemes.forms if form is not None):
        return
    limit = "needs a CPU, bfloat16, and Octavo's C++ kernels built and not switched off, or a GPU and Triton"
    if isinstance(schemes.quantization.linear, Float8Format):
        limit = "needs a GPU and Triton: a CPU has no kernels for 8-bit floats"
    raise InvalidParameterError("quantization", schemes.name, f"{limit}; here it is {where}")
