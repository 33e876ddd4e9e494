"""Connects the engine's tokenizer to the grammar library on the first structured output request."""

from functools import partial
from pathlib import Path
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.structured.backend import GrammarBackend
from octavo.structured.manager import GrammarManager


def make_grammars(config: EngineConfig) -> GrammarManager[Any]:
    """Return the manager of all requests' grammars. It costs nothing until the first request with one."""
    return GrammarManager(partial(_make_backend, config))


def _make_backend(config: EngineConfig) -> GrammarBackend[Any]:
    from octavo.structured.llguidance_backend import LLGuidanceBackend
    from octavo.tokenizer.files import read_tokenizer_files

    files = read_tokenizer_files(Path(config.tokenizer_path))
    token_ids = files.backend.get_vocab(with_added_tokens=True).values()
    added = files.backend.get_added_tokens_decoder()
    return LLGuidanceBackend(
        files.backend.to_str(),
        num_tokens=max(token_ids) + 1,
        vocab_size=config.model.vocab_size,
        added_tokens={token.content: token_id for token_id, token in added.items()},
        end_token_ids=files.end_token_ids(config.model.eos_token_ids, config.model.vocab_size),
    )
