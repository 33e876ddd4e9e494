"""Random weights for load tests: a folder with only `config.json` is enough.

All matrices share one block of random numbers: row i is the slice of the block that begins i places further on. That is
a view, so 0.6 billion parameters cost one copy into the model and almost no random generation.
"""

import math
from collections.abc import Iterator

import torch

from octavo.layers.linear import MergedLinear
from octavo.layers.quant.gguf import BlockScheme
from octavo.layers.quant.mxfp4 import MXFP4, arbitrary_rows
from octavo.loader.base import ModelLoader
from octavo.models.interfaces import CausalLM
from octavo.models.weights import WeightSlot, numbers_in, weight_slots

# The distance and range of the matrices' offsets in the block, so that no two neighbors are equal.
_STRIDE, _NUM_STARTS = 7919, 1 << 18


class DummyLoader(ModelLoader):
    """Same seed, same weights, on any stage. Norms are one, biases zero, matrices preserve the variance of their input;
    quantized weights are arbitrary integers."""

    reads_files = False

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        slots = weight_slots(model)
        longest = max(sum(slot.spec.shape) for slot in slots.values())
        generator = torch.Generator().manual_seed(self.load_config.seed)
        block = torch.empty(_NUM_STARTS + longest).uniform_(-math.sqrt(3.0), math.sqrt(3.0), generator=generator)
        scaled: dict[int, torch.Tensor] = {}  # by number of inputs, in the model's dtype
        names = (  # in the order of the whole model's table, identically on every stage
            template.format(**numbers)
            for template in {**model.weight_names, **model.weight_targets}
            for numbers in numbers_in(template, range(model.config.num_layers), model.num_experts)
        )
        places = {name: index for index, name in enumerate(names)}
        for name, slot in slots.items():
            shape = slot.spec.shape
            if not slot.spec.is_required:
                continue
            if slot.spec.is_integer:
                yield name, _integers(slot, generator)
                continue
            if len(shape) < 2:
                yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
                continue
            num_outputs, num_inputs = shape[0], math.prod(shape[1:])
            if num_inputs not in scaled:
                values = (block / math.sqrt(num_inputs)).to(model.context.dtype)
                scaled[num_inputs] = values.to(model.context.device)  # matrices are expanded on the device
            start = places[name.rpartition(".")[0]] * _STRIDE % _NUM_STARTS
            matrix = scaled[num_inputs].as_strided((num_outputs, num_inputs), (1, 1), start).reshape(shape)
            yield name, matrix.to(torch.float8_e4m3fn) if slot.spec.is_float8 else matrix


def _integers(slot: WeightSlot, generator: torch.Generator) -> torch.Tensor:
    """Return arbitrary integers; in blocks with an exponent, only such that no product overflows."""
    scheme = slot.owner.scheme if isinstance(slot.owner, MergedLinear) else None
    if isinstance(scheme, BlockScheme) and set(scheme.kinds) == {MXFP4}:
        return arbitrary_rows(slot.spec.shape, generator)
    return torch.randint(-(2**31), 2**31, slot.spec.shape, generator=generator).to(torch.int32)
