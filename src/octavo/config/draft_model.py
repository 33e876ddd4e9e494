"""The draft model of `speculative_config`: found, read, and checked against the model that verifies its drafts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import resolve_model
from octavo.config.model import ModelConfig
from octavo.config.speculative import DraftModelConfig, SpeculativeConfig, named_by_key
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import ModelNotFoundError, UnsupportedModelError


def resolve_draft_model(options: SpeculativeConfig, model: ModelConfig, *, with_weights: bool) -> DraftModelConfig:
    """Return the draft model's configuration. Its dtype is the model's.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: about the draft model.
        InvalidParameterError: a quantization that does not fit it.
    """
    path = resolve_drafting(options, with_weights=with_weights)
    assert options.model is not None, "checked by SpeculativeConfig"
    draft = read_model_config(path, model=options.model, dtype=model.dtype)
    draft = replace(draft, max_model_len=min(draft.max_model_len, model.max_model_len))
    if draft.recurrent is not None:
        raise UnsupportedModelError(
            f"speculative_config: {draft.model}: its recurrent states cannot roll back drafts that were rejected"
        )
    with named_by_key():
        quantization, draft = resolve_quantization(options.quantization, draft, path)
    return DraftModelConfig(
        model=draft,
        quantization=quantization,
        tokenizer_path=str(path),
        kv_groups=kv_groups_for(draft, model),
    )


def resolve_drafting(options: SpeculativeConfig, *, with_weights: bool) -> Path:
    """Return where the draft model or head is.

    Raises:
        ModelNotFoundError: it is nowhere; the message names the option.
    """
    assert options.model is not None, "checked by SpeculativeConfig"
    try:
        return resolve_model(options.model, options.revision, with_weights=with_weights)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: model: {error}") from error


def kv_groups_for(draft: ModelConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return, for each KV group of a draft model, the model's group whose blocks it uses.

    Raises:
        UnsupportedModelError: none fits.
    """
    return tuple(_group_for(group, model.kv_groups, draft) for group in draft.kv_groups)


def _group_for(group: KVGroup, groups: Sequence[KVGroup], draft: ModelConfig) -> int:
    """Return which of `groups` keeps the blocks that `group` needs: the one that frees most of the others.

    Raises:
        UnsupportedModelError: none does.
    """
    reach = group.sliding_window or draft.max_model_len
    fitting = {
        index: each.sliding_window or draft.max_model_len
        for index, each in enumerate(groups)
        if each.kind != "recurrent" and (each.sliding_window is None or each.sliding_window >= reach)
    }
    if not fitting:
        windows = ", ".join(str(each.sliding_window) for each in groups)
        raise UnsupportedModelError(
            f"speculative_config: {draft.model} attends to {reach} tokens, but the model keeps only sliding windows "
            f"of {windows}, and a draft model uses the model's KV blocks"
        )
    return min(fitting, key=lambda index: fitting[index])
