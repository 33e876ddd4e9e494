"""The ops of layers that keep a state, in C++: part of `NativeKernels`."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels.gated_delta import GatedDeltaWeights
from octavo.kernels.native_weights import NO_ADDRESS, address
from octavo.kernels.reference import Kernels
from octavo.kernels.short_conv import ShortConvWeights
from octavo.kernels.state_space import GroupNorm, StateSpaceWeights
from octavo.kernels.states import StateStep, StateTensors

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu


class NativeStates(Kernels, ABC):
    """Tensors are passed as addresses and sizes. A recorded op is told of its step when it is replayed."""

    native: "_cpu.Kernels"

    @abstractmethod
    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a result, in `dtype` or the kernels'."""

    def gated_delta_net(
        self, weights: GatedDeltaWeights, rows: Tensor, gates: Tensor, states: StateTensors, step: StateStep
    ) -> Tensor:
        from octavo.kernels.cpu import _cpu

        out = self.empty(len(rows), weights.num_value_heads * weights.value_size)
        layer = _cpu.GatedDelta(
            num_key_heads=weights.num_key_heads,
            num_value_heads=weights.num_value_heads,
            key_size=weights.key_size,
            value_size=weights.value_size,
            conv_size=len(weights.conv),
            conv=weights.conv.data_ptr(),
            decay_rates=weights.decay_rates.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            eps=weights.eps,
        )
        addresses = (rows.data_ptr(), gates.data_ptr(), states.conv.data_ptr(), states.matrix.data_ptr())
        ends = *_log(states), out.data_ptr()
        self.native.gated_delta(self.state_step(step), layer, step.kv_group, *addresses, *ends)
        return out

    def state_step(self, step: StateStep) -> "_cpu.StateStep":
        """Return the kernels' description of a step, which points to its tensors."""
        from octavo.kernels.cpu import _cpu

        return _cpu.StateStep(
            num_requests=len(step.begins),
            query_start_loc=step.query_start_loc.data_ptr(),
            slots=step.slots.data_ptr(),
            begins=step.begins.data_ptr(),
            num_replayed=address(step.num_replayed),
            num_drafts=address(step.num_drafts),
            rows=address(step.rows),
        )

    def short_conv(self, weights: ShortConvWeights, rows: Tensor, states: StateTensors, step: StateStep) -> Tensor:
        from octavo.kernels.cpu import _cpu

        conv_size, num_channels = weights.conv.shape
        out = self.empty(len(rows), num_channels)
        layer = _cpu.ShortConv(num_channels, conv_size, weights.conv.data_ptr(), address(weights.bias))
        addresses = rows.data_ptr(), states.conv.data_ptr(), *_log(states), out.data_ptr()
        self.native.short_conv(self.state_step(step), layer, step.kv_group, *addresses)
        return out

    def state_space(self, weights: StateSpaceWeights, rows: Tensor, states: StateTensors, step: StateStep) -> Tensor:
        from octavo.kernels.cpu import _cpu

        out = self.empty(len(rows), weights.width)
        layer = _cpu.StateSpace(
            num_groups=weights.num_groups,
            num_heads=weights.num_heads,
            key_size=weights.key_size,
            value_size=weights.value_size,
            conv_size=len(weights.conv),
            conv=weights.conv.data_ptr(),
            conv_bias=address(weights.conv_bias),
            decay_rates=weights.decay_rates.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            least_dt=weights.dt_limit[0],
            most_dt=weights.dt_limit[1],
            dt_scale=weights.dt_scale,
            gate_scale=weights.gate_scale,
            applies_gates=weights.applies_gates,
        )
        addresses = rows.data_ptr(), states.conv.data_ptr(), states.matrix.data_ptr(), *_log(states), out.data_ptr()
        self.native.state_space(self.state_step(step), layer, step.kv_group, *addresses)
        return out

    def group_sums(self, x: Tensor, norm: GroupNorm) -> Tensor:
        sums = self.empty(len(x), norm.num_groups, dtype=torch.float32)
        self._norm(x, norm, None, sums, NO_ADDRESS, only_sums=True)
        return sums

    def norm_groups(self, x: Tensor, norm: GroupNorm, gates: Tensor | None, sums: Tensor | None) -> Tensor:
        out = self.empty(*x.shape)
        self._norm(x, norm, gates, sums, out.data_ptr(), only_sums=False)
        return out

    def _norm(
        self, x: Tensor, norm: GroupNorm, gates: Tensor | None, sums: Tensor | None, out: int, *, only_sums: bool
    ) -> None:
        from octavo.kernels.cpu import _cpu

        assert gates is None or gates.stride(1) == 1
        self.native.norm_groups(
            _cpu.GroupNorm(
                x=x.data_ptr(),
                gates=address(gates),
                gate_stride=0 if gates is None else gates.stride(0),
                gate_scale=norm.gate_scale,
                num_rows=len(x),
                width=norm.width,
                group_size=norm.group_size,
                first_column=norm.first,
                num_groups=norm.num_groups,
                weight=norm.weight.data_ptr(),
                eps=norm.eps,
                sums=address(sums),
                only_sums=only_sums,
                out=out,
            )
        )


def _log(states: StateTensors) -> tuple[int, int]:
    """Return the address of a layer's log, and how many drafts of a request it holds."""
    return address(states.log), 0 if states.log is None else states.log.shape[1]
