"""The result of one step: what the ranks send back to the scheduler. Integers and floats, no device tensors."""

from functools import cached_property

import msgspec

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array
from octavo.contracts.stats import ExpertLoad


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Sampled tokens, in the order of the `SchedulerOutput` that scheduled them.

    Legend: R = requests in the step, K = maximum of tokens for one of them (1 without drafts).
    """

    req_ids: tuple[str, ...]  # [R]
    sampled_token_ids: Int32Array  # [R, K]; row i has num_sampled[i] valid entries
    num_sampled: Int32Array  # [R]; 0 if the prompt is not complete yet, or the request is in `errors`
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # sent when the prompt is complete
    errors: dict[str, str] = {}  # requests that failed individually (NaN logits, ...), with the reason
    draft_passes: list[tuple[int, float]] = []  # of a draft model, in this step: tokens and seconds of each
    expert_load: ExpertLoad | None = None  # only for MoE models
    compute_s: float | None = None  # of this step, in native calls; None: not measured

    @cached_property  # cached in the instance's __dict__
    def req_id_to_index(self) -> dict[str, int]:
        return {req_id: index for index, req_id in enumerate(self.req_ids)}
