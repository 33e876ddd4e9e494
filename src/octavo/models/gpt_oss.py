"""gpt-oss (OpenAI 2025, arXiv:2508.10925): all that it computes is in its layers' specs, but not how it is stored.

Checkpoints hold the experts of a layer as stacks, in which the rows of gates and ups take turns: in MXFP4, codes
[experts, N, K / 32, 16] and exponents [experts, N, K / 32]; in floats, transposed, [experts, K, N].
"""

import re
from collections.abc import Iterable, Iterator

import torch

from octavo.errors import CheckpointError
from octavo.kernels.blocks import dequantize
from octavo.layers.quant.mxfp4 import MXFP4, Mxfp4Schemes, rows_of_blocks
from octavo.models.interfaces import CausalLM

_STACK = re.compile(
    r"(?P<experts>model\.layers\.\d+\.mlp\.experts)\.(?P<linear>gate_up|down)_proj(_(?P<kind>bias|blocks|scales))?"
)


class GptOssForCausalLM(CausalLM):
    """The table of names has the experts one by one, as GGUF files have them."""

    def laid_out(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the experts' tensors one by one, gates apart from ups, blocks in GGUF's order."""
        halves: dict[tuple[str, str], tuple[str, torch.Tensor]] = {}  # of MXFP4: the one that came first
        for name, tensor in tensors:
            found = _STACK.fullmatch(name)
            if found is None:
                yield name, tensor
                continue
            self._check_stack(name, tensor, num_dims={"bias": 2, "blocks": 4}.get(found["kind"], 3))
            linear = found["experts"], found["linear"]
            if found["kind"] == "bias":
                yield from _of_experts(*linear, "bias", tensor)
            elif found["kind"] is None:
                yield from _of_experts(*linear, "weight", (stack.T for stack in tensor))
            elif linear not in halves:
                halves[linear] = name, tensor
            else:
                other_name, other = halves.pop(linear)
                codes, exponents = (tensor, other) if found["kind"] == "blocks" else (other, tensor)
                if codes.shape != (*exponents.shape, 16) or {codes.dtype, exponents.dtype} != {torch.uint8}:
                    why = f"{list(codes.shape)} and {list(exponents.shape)} of bytes do not fit together"
                    raise CheckpointError(f"{self.config.path}: tensors {other_name!r} and {name!r}: {why}")
                yield from _of_experts(*linear, "weight", map(self._rows, codes, exponents))
        if halves:
            name, _ = next(iter(halves.values()))
            raise CheckpointError(f"{self.config.path}: tensor {name!r}: MXFP4 is blocks and scales, one is missing")

    def _rows(self, codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """Return an expert's rows of blocks, or their values if the model computes with floats."""
        rows = rows_of_blocks(codes, exponents)
        return rows if isinstance(self.context.schemes, Mxfp4Schemes) else dequantize(rows, MXFP4)

    def _check_stack(self, name: str, stack: torch.Tensor, *, num_dims: int) -> None:
        if stack.dim() != num_dims or len(stack) != self.num_experts:
            why = f"a stack of {self.num_experts} experts in {num_dims} dimensions is expected"
            raise CheckpointError(f"{self.config.path}: tensor {name!r}: {why}, found {list(stack.shape)}")


def _of_experts(
    experts: str, linear: str, parameter: str, stack: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, rows in enumerate(stack):
        if linear == "down":
            yield f"{experts}.{number}.down_proj.{parameter}", rows
        else:
            yield f"{experts}.{number}.gate_proj.{parameter}", rows[0::2]
            yield f"{experts}.{number}.up_proj.{parameter}", rows[1::2]
