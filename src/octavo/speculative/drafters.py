"""The drafter of a configuration."""

from octavo.config.engine import EngineConfig
from octavo.contracts.drafter import Drafter
from octavo.speculative.ngram import NgramDrafter
from octavo.speculative.rank_drafter import RankDrafter


def make_drafter(config: EngineConfig) -> Drafter | None:
    """Return the scheduler's drafter; None without speculative decoding."""
    options = config.speculative
    if options is None:
        return None
    if config.draft_model is not None:
        return RankDrafter(options.num_speculative_tokens, config.draft_model.model.max_model_len)
    return NgramDrafter(options.num_speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max)
