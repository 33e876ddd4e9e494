"""The answer of one step: what the ranks tell the scheduler. Integers and floats, no device tensors."""

from functools import cached_property

import msgspec

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array
from octavo.contracts.stats import ExpertLoad


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Sampled tokens, in the order of the `SchedulerOutput` that asked for them.

    Legend: R = requests in the step, K = most tokens that one of them may get (1 without drafts).
    """

    req_ids: tuple[str, ...]  # [R]
    sampled_token_ids: Int32Array  # [R, K]; row i has num_sampled[i] valid entries
    num_sampled: Int32Array  # [R]; 0 where a prompt is not yet complete, or the request is in `errors`
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # when the prompt is complete
    errors: dict[str, str] = {}  # requests that failed alone (NaN logits, ...), and why
    draft_token_ids: dict[str, list[int]] = {}
    expert_load: ExpertLoad | None = None  # of models with experts

    @cached_property  # in the instance's dictionary
    def req_id_to_index(self) -> dict[str, int]:
        return {req_id: index for index, req_id in enumerate(self.req_ids)}
