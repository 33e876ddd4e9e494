"""The drafter of a configuration."""

from octavo.config.speculative import SpeculativeConfig
from octavo.contracts.drafter import Drafter
from octavo.speculative.ngram import NgramDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter:
    return NgramDrafter(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
