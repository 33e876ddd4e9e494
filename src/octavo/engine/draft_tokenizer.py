"""Checks that a draft model has the same tokens as the model that verifies its drafts."""

from pathlib import Path

from octavo.config.model import ModelConfig
from octavo.config.speculative import DraftModelConfig
from octavo.errors import InvalidParameterError
from octavo.tokenizer.tokenizer import Tokenizer


def check_draft_tokenizer(draft: DraftModelConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Compare the draft model's tokenizer with the model's: ids that both have must be the same text.

    One of them may have more tokens: vocabularies of one family are padded in different ways. A checkpoint without a
    tokenizer must have a vocabulary of the same size.

    Raises:
        InvalidParameterError: they differ; the message names the first token that does.
    """
    path = Path(draft.tokenizer_path)
    if not (path.is_file() or (path / "tokenizer.json").is_file()):
        if draft.model.vocab_size != model.vocab_size:
            sizes = f"{draft.model.vocab_size} tokens, but {model.model} has {model.vocab_size}"
            raise _error(draft, f"it has no tokenizer, and a vocabulary of {sizes}")
        return
    theirs, ours = (
        {id_: text for text, id_ in each.vocabulary.items()} for each in (Tokenizer.from_path(path), tokenizer)
    )
    if different := sorted(id_ for id_ in theirs.keys() & ours.keys() if theirs[id_] != ours[id_]):
        at = different[0]
        what = f"{len(different)} tokens differ; id {at} is {theirs[at]!r}, and {ours[at]!r} for {model.model}"
        raise _error(draft, f"not the same tokenizer: {what}")


def _error(draft: DraftModelConfig, limit: str) -> InvalidParameterError:
    return InvalidParameterError("speculative_config", {"model": draft.model.model}, limit)
