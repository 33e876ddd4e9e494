"""What layers keep of a request in a state of fixed size, and where a step reads and writes it.

Legend: T = tokens of the step, R = requests, C = channels of a convolution, H = heads, K = rows of a head's state,
V = its columns, S = tokens that the state of the convolution holds, D = most drafts of a request, N = rows of requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StateStep:
    """One step of a recurrent KV group.

    Request r first computes `num_replayed[r]` tokens again, from their logged inputs: they had been drafts, and the
    state at `begins[r]` is the one before them. Then its tokens of the step, of which the last `num_drafts[r]` are
    drafts: their states are nowhere to be kept, but their inputs are logged.
    """

    kv_group: int
    query_start_loc: Tensor  # [R + 1] int32
    query_start_loc_list: list[int]
    slots: Tensor  # [T] int64, where the state after each token is kept; -1: nowhere
    begins: Tensor  # [R] int64, where the state is that requests begin with; -1: zeros
    num_replayed: Tensor | None = None  # [R] int32; None: no request replays or logs any
    num_drafts: Tensor | None = None  # [R] int32
    rows: Tensor | None = None  # [R] int64, below N: whose part of the log a request has

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def has_one_each(self) -> bool:
        """Whether every request computes one token, and none again."""
        return self.num_replayed is None and len(self.begins) == len(self.slots)

    def replayed_and_drafted(self) -> tuple[list[int], list[int]]:
        """Return how many tokens each request computes again, and how many drafts it has. Waits for the device."""
        nothing = [0] * len(self.begins)
        return (
            nothing if self.num_replayed is None else self.num_replayed.tolist(),
            nothing if self.num_drafts is None else self.num_drafts.tolist(),
        )

    def row(self, request: int) -> int:
        """Return whose part of the log a request has. Waits for the device."""
        assert self.rows is not None, "drafts are logged"
        return int(self.rows[request])


class OneRequest(NamedTuple):
    """A request's part of a step, and the states that it begins with."""

    inputs: Tensor  # [tokens, any]: of those that are computed again, then of the step's
    num_again: int
    slots: list[int]  # where the state after each of them is kept; -1: nowhere
    conv: Tensor  # [S, C]
    matrix: Tensor  # [1, H, K, V], if there is a recurrence


@dataclass(frozen=True, slots=True)
class StateTensors:
    """One layer's states, one per block; and what its drafts had as inputs."""

    conv: Tensor  # [blocks, S, C]
    matrix: Tensor = field(default_factory=lambda: torch.empty(0))  # [blocks, H, K, V] float32, if it has a recurrence
    log: Tensor | None = None  # [N, D, what the layer logs of a token], for drafts; None: there are none

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """What is kept from step to step."""
        return (self.conv, self.matrix) if self.matrix.dim() > 1 else (self.conv,)

    def begin_of(self, step: StateStep) -> tuple[Tensor, Tensor]:
        """Return the states that requests begin with, [R, ...]: without waiting for a device."""
        fresh = step.begins < 0  # of slot -1: anything
        conv = self.conv[step.begins].masked_fill(fresh[:, None, None], 0)
        matrix = self.matrix if self.matrix.dim() == 1 else self.matrix[step.begins]
        return conv, matrix.masked_fill(fresh[:, None, None, None], 0) if matrix.dim() > 1 else matrix

    def requests(self, inputs: Tensor, step: StateStep) -> Iterator[OneRequest]:
        """Yield the requests of inputs [T, any], one after the other, and log those of drafts. Waits for the device."""
        slots, starts = step.slots.tolist(), step.query_start_loc_list
        replayed, drafted = step.replayed_and_drafted()
        for request, begin in enumerate(step.begins.tolist()):
            conv, matrix = (
                of[begin : begin + 1].clone() if begin >= 0 else torch.zeros_like(of[:1])
                for of in (self.conv, self.matrix)
            )
            first, end, num_again = starts[request], starts[request + 1], replayed[request]
            own = inputs[first:end]
            if num_again or drafted[request]:
                own = self._with_logged(own, step.row(request), num_again, drafted[request])
            yield OneRequest(own, num_again, [-1] * num_again + slots[first:end], conv[0], matrix)

    def keep(self, slot: int, window: Tensor, token: int, matrix: Tensor | None = None) -> None:
        """Keep the states after a token: the last rows of window [S + tokens, C] up to it, and matrix [1, H, K, V]."""
        if slot < 0:
            return
        self.conv[slot] = window[token + 1 : token + 1 + self.conv.shape[1]]
        if matrix is not None:
            self.matrix[slot] = matrix[0]

    def _with_logged(self, inputs: Tensor, row: int, num_again: int, num_drafts: int) -> Tensor:
        """Return a request's inputs [tokens, any] behind those that it computes again; log those of its drafts."""
        assert self.log is not None, "drafts are logged"
        log = self.log[row]
        again = log[:num_again].clone()
        if num_drafts:
            log[:num_drafts] = inputs[-num_drafts:]
        return torch.cat((again, inputs))
