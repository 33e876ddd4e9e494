"""Selects the schemes of a model's layers: those of its checkpoint, or of `quantization=` for dense weights."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.config.hf_quantization import METHODS_WITH_BLOCKS
from octavo.config.json_fields import JsonFields
from octavo.config.model import CheckpointQuantization
from octavo.errors import InvalidParameterError
from octavo.kernels.quantization import Float8Format, WeightFormat, get_quantization
from octavo.kernels.reference import Kernels
from octavo.layers.quant.base import QuantizedAtLoad, Schemes
from octavo.layers.quant.compressed_tensors import CompressedTensorsSchemes
from octavo.layers.quant.float8 import read_float8
from octavo.layers.quant.gguf import GgufSchemes
from octavo.layers.quant.grouped import GPTQSchemes, read_awq
from octavo.layers.quant.mxfp4 import Mxfp4Schemes
from octavo.layers.quant.octavo import OctavoSchemes

logger = logging.getLogger(__name__)

# By quant_method; `config/hf_quantization.py` lists the names.
CHECKPOINT_SCHEMES: Mapping[str, Callable[[JsonFields], Schemes]] = MappingProxyType(
    {
        "awq": read_awq,
        "fbgemm_fp8": read_float8,
        "fp8": read_float8,
        "octavo": OctavoSchemes,
        "gptq": GPTQSchemes,
        "compressed-tensors": CompressedTensorsSchemes,
        "mxfp4": Mxfp4Schemes,
    }
)


def make_schemes(checkpoint: CheckpointQuantization | None, quantization: str | None = None) -> Schemes:
    """Return the schemes of a quantized checkpoint, those of `quantization=`, or of both: of 8-bit floats."""
    if checkpoint is None:
        return QuantizedAtLoad(get_quantization(quantization) if quantization else None)
    make = GgufSchemes if checkpoint.method == "gguf" else CHECKPOINT_SCHEMES[checkpoint.method]
    schemes = make(checkpoint.fields)
    if quantization is None or quantization == checkpoint.method == "gguf":
        return schemes
    return QuantizedAtLoad(get_quantization(quantization), schemes)


def resolve_schemes(
    checkpoint: CheckpointQuantization | None,
    quantization: str | None,
    kernels_for: Callable[[frozenset[WeightFormat | None]], Kernels],
    where: str,
) -> tuple[Schemes, Kernels]:
    """Return the schemes of a model and the kernels that compute them.

    Blocks that no kernels here compute are dequantized at load, which a warning says.
    """
    schemes = make_schemes(checkpoint, quantization)
    kernels = kernels_for(schemes.forms)
    is_computed = all(kernels.computes(form) for form in schemes.forms if form is not None)
    if checkpoint is not None and checkpoint.method in METHODS_WITH_BLOCKS and not is_computed:
        limit = (
            f"needs a CPU, 16-bit activations, and Octavo's C++ kernels built and not switched off; here it is {where}"
        )
        if quantization == "gguf":
            raise InvalidParameterError("quantization", quantization, limit)
        why = "take the memory of dense weights: computing with their blocks"
        logger.warning("%s: tensors are dequantized at load and %s %s", checkpoint.method.upper(), why, limit)
        schemes = QuantizedAtLoad()
        kernels = kernels_for(schemes.forms)
    check_quantization_at_load(schemes, kernels, where)
    return schemes, kernels


def check_quantization_at_load(schemes: Schemes, kernels: Kernels, where: str) -> None:
    """Check that these kernels support `quantization=`: it is for speed, and dequantizing would not be faster."""
    if not isinstance(schemes, QuantizedAtLoad) or schemes.quantization is None:
        return
    if all(kernels.computes(form) for form in schemes.forms if form is not None):
        return
    limit = "needs a CPU, 16-bit activations, and Octavo's C++ kernels built and not switched off, or a GPU and Triton"
    if isinstance(schemes.quantization.linear, Float8Format):
        limit = "needs a GPU and Triton: a CPU has no kernels for 8-bit floats"
    raise InvalidParameterError("quantization", schemes.name, f"{limit}; here it is {where}")
