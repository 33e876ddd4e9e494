"""Writes a model's settings and tokenizer as metadata of a GGUF file. Keys: ggml's docs/gguf.md.

Legend: `backend` is the JSON of a tokenizer of the `tokenizers` library.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from octavo.config.families.gemma3 import gguf_attention_divisor
from octavo.config.hf_layers import yarn_attention_factor
from octavo.config.model import ModelConfig
from octavo.errors import UnsupportedModelError
from octavo.tokenizer.files import TokenizerFiles
from octavo.tokenizer.gguf import SPACE, merges_by_score, pre_tokenizer_name

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREFIX = {"type": "Prepend", "prepend": SPACE}
_NORMALIZERS = (
    _SPACES,
    {"type": "Sequence", "normalizers": [_SPACES]},
    {"type": "Sequence", "normalizers": [_PREFIX, _SPACES]},
)
# Splitting at spaces does nothing: they have become something else before.
_PRE_TOKENIZERS = (
    None,
    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
)
# enum llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NO_SCORE = -10000.0  # of what no merge makes
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_YARN_BETA_FAST, _YARN_BETA_SLOW = 32.0, 1.0  # what readers take where a file has none


def write_settings(writer: Any, library: Any, model: ModelConfig) -> None:
    writer.add_name(model.model)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    spec, windows = model.attention(0), model.sliding_windows
    after = model.dense or model.experts
    assert after is not None, "a model has layers"
    writer.add_feed_forward_length(after.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.rotary[0].width)
    _write_rope(writer, library, model)
    if model.architecture == "Gemma3ForCausalLM":
        _write_gemma3_settings(writer, model, windows)
    elif len(set(windows)) > 1:
        raise UnsupportedModelError(f"{model.model}: gguf files have one sliding window for all layers")
    elif windows[0] is not None:
        writer.add_sliding_window(windows[0])
    if (experts := model.experts) is not None:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.top_k)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
        if experts.shared_intermediate_size is not None:
            writer.add_expert_shared_feed_forward_length(experts.shared_intermediate_size)


def _write_gemma3_settings(writer: Any, model: ModelConfig, windows: tuple[int | None, ...]) -> None:
    """Add windows, the rotary base of layers that have one, and the cap of logits."""
    spec = model.attention(0)
    divisor = gguf_attention_divisor(model.num_layers, model.hidden_size, spec.num_heads, spec.head_dim)
    scale = spec.scale
    if scale is None or not math.isclose(scale, divisor**-0.5, rel_tol=1e-6):
        said = "none" if scale is None else f"{scale**-2:g}"
        limit = f"query_pre_attn_scalar is {said}; files do not say it, and readers take {divisor}"
        raise UnsupportedModelError(f"{model.model}: cannot be written as gguf: {limit}")
    if window := next(filter(None, windows), None):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([window is not None for window in windows])
    for table in model.rotary[1:]:
        writer.add_rope_freq_base_swa(table.rope.theta)
    if model.logits_soft_cap is not None:
        writer.add_final_logit_softcapping(model.logits_soft_cap)


def _write_rope(writer: Any, library: Any, model: ModelConfig) -> None:
    rope = model.rotary[0].rope
    writer.add_rope_freq_base(rope.theta)
    if rope.kind in ("default", "llama3"):  # the latter's factors are a tensor
        return
    if rope.kind not in ("linear", "yarn") or rope.mscale is not None or not rope.truncate:
        why = f"rope_type={rope.kind!r} with its settings cannot be written as gguf"
        raise UnsupportedModelError(f"{model.model}: {why}")
    writer.add_rope_scaling_type(library.RopeScalingType(rope.kind))
    writer.add_rope_scaling_factor(rope.factor)
    if rope.original_max_position is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    if rope.kind == "yarn":
        if rope.attention_factor is not None:  # readers multiply YaRN's own by it
            writer.add_rope_scaling_attn_factors(rope.attention_factor / yarn_attention_factor(rope.factor))
        if rope.beta_fast != _YARN_BETA_FAST:
            writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        if rope.beta_slow != _YARN_BETA_SLOW:
            writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)


def write_tokenizer(writer: Any, files: TokenizerFiles, model: ModelConfig, origin: str) -> None:
    """Add a byte-level or SentencePiece BPE tokenizer and its chat templates."""
    backend, name = json.loads(files.backend.to_str()), pre_tokenizer_name(files.backend)
    scores = _token_scores(backend) if name is None else None
    if name is None and scores is None:
        raise UnsupportedModelError(
            f"{origin}: its tokenizer has no name in gguf; byte-level BPE of known families and SentencePiece BPE have"
        )
    tokens = [f"[PAD{index}]" for index in range(model.vocab_size)]
    types = [_UNUSED] * len(tokens)
    for text, index in files.backend.get_vocab(with_added_tokens=False).items():
        tokens[index], types[index] = text, _NORMAL
    for index, token in files.backend.get_added_tokens_decoder().items():
        tokens[index], types[index] = token.content, _CONTROL if token.special else _USER_DEFINED
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    writer.add_tokenizer_pre(name or "default")
    if scores is not None:
        _spell_as_sentencepiece(backend, tokens, types)
    writer.add_token_list(tokens)
    if scores is not None:
        writer.add_token_scores([scores.get(text, _NO_SCORE) for text in tokens])
    writer.add_token_types(types)
    if scores is None:
        merges = backend["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    else:
        writer.add_add_space_prefix(_PREFIX in backend["normalizer"].get("normalizers", []))
    templates = files.chat_templates
    if "default" in templates:
        writer.add_string("tokenizer.chat_template", templates["default"])
    if "tool_use" in templates:
        writer.add_string("tokenizer.chat_template.tool_use", templates["tool_use"])


def _spell_as_sentencepiece(backend: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    for index, text in enumerate(tokens):
        if text == backend["model"]["unk_token"]:
            types[index] = _UNKNOWN
        elif _BYTE_TOKEN.fullmatch(text):
            types[index] = _BYTE
        elif types[index] == _USER_DEFINED:
            tokens[index] = text.replace(SPACE, " ")  # readers look for these in the text as it is


def _token_scores(backend: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the scores of tokens that merges make; None: not a SentencePiece BPE, or scores cannot say its merges."""
    model = backend["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    if backend["normalizer"] not in _NORMALIZERS or backend["pre_tokenizer"] not in _PRE_TOKENIZERS:
        return None
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    said = merges_by_score(tokens, [scores.get(token, -float(len(merges))) for token in tokens])
    # The order of merges that make the same token is free.
    is_same = set(said) == set(merges) and [left + right for left, right in said] == ["".join(each) for each in merges]
    return scores if is_same else None


def write_special_ids(writer: Any, files: TokenizerFiles | None, model: ModelConfig) -> None:
    """Add the ids of tokens with a meaning, as the tokenizer names them or else as the model does."""
    named = {} if files is None else files.named_tokens
    ids = {name: files.backend.token_to_id(text) for name, text in named.items() if files is not None}
    end = ids.get("eos_token", next(iter(model.eos_token_ids), None))
    others = [index for index in model.eos_token_ids if index != end]
    bos = ids.get("bos_token", model.bos_token_id)
    for add, index in (
        (writer.add_bos_token_id, bos),
        (writer.add_eos_token_id, end),
        (writer.add_eot_token_id, next(iter(others), None)),
        (writer.add_unk_token_id, ids.get("unk_token")),
        (writer.add_pad_token_id, ids.get("pad_token")),
    ):
        if index is not None:
            add(index)
    around = [] if files is None else files.backend.encode("").ids
    writer.add_add_bos_token(bos is not None and bos in around)
    writer.add_add_eos_token(end is not None and end != bos and end in around)
