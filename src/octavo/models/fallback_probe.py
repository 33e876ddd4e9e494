"""Looks at a checkpoint that transformers knows and Octavo does not: what its layers keep, found by running them.

A process of its own, as the side that reads configurations has no torch. It builds the installed library's own class on
the meta device, without weights, runs two tokens through it, notes each call of attention, and prints one JSON object:
`error`, or what `config/fallback.py` reads. No code of a checkpoint is ever run.
"""

import copy
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, logging

from octavo.errors import UnsupportedModelError
from octavo.models.fallback_heads import head_width, longrope, replace_own_attention

NAME = "octavo"  # of our attention, in the library: it makes no mask for one that it does not know
_NO_LENGTH = 2048  # tokens of a context whose positions have no limit, where the configuration names none
_ONE_BUILDS = threading.Lock()  # of all threads, as building changes the library for a while
_REFUSED = ("position_bias",)  # arguments of attention that would change the result
_MASK, _WINDOW_MASK = re.compile(r"create_\w*mask"), "create_sliding_window_causal_mask"
_MASK_PARTS = ("or_mask_function", "and_mask_function", "block_sequence_ids")


def build(folder: Path, attention: Callable[..., Any], dtype: torch.dtype, experts: str) -> Any:
    """Return the library's model with our `attention`: weights on the meta device, other buffers computed.

    `experts` is its way of computing mixtures: "batched_mm" also without values, "eager" in any dtype.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    AttentionInterface.register(NAME, attention)
    options = {"trust_remote_code": False, "experts_implementation": experts, "dtype": dtype}
    with _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, **options).eval()
        except KeyError:  # a class that chooses its attention from a table of its own
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options).eval()
            model.config._attn_implementation = NAME  # no masks
    has_own = replace_own_attention(model, attention)
    if not has_own and not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError("its attention cannot be replaced: states, or attention of its own")
    for module in model.modules():
        if hasattr(
            module, "warn_if_padding_and_no_attention_mask"
        ):  # reads ids, which may have no values; none is padding
            module.warn_if_padding_and_no_attention_mask = _no_padding
    return model


def _no_padding(*_: object) -> None:
    """Tokens are never padded here."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """What this thread builds in the block has its parameters there; other threads may load weights meanwhile."""
    with _ONE_BUILDS:
        register, builder = nn.Module.register_parameter, threading.get_ident()

        def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            is_own = threading.get_ident() == builder
            if is_own and parameter is not None and not parameter.is_meta:  # one that is may be tied to another
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            register(module, name, parameter)

        nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def probe(folder: Path) -> dict[str, Any]:
    """Return the facts about a model; raises UnsupportedModelError, or whatever the library raises."""
    calls: list[dict[str, Any]] = []

    def attention(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        _check_call(module, query, key, value, attention_mask, options)
        calls.append(
            {
                "layer": getattr(module, "layer_idx", None),
                "num_heads": query.shape[1],
                "num_kv_heads": key.shape[1],
                "head_dim": head_width(query, value, options.get("alibi")),
                "scale": query.shape[3] ** -0.5 if options.get("scaling") is None else options["scaling"],
                "sliding_window": options.get("sliding_window"),
                "soft_cap": options.get("softcap"),
            }
        )
        found = value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        return found, None

    model = build(folder, attention, torch.float32, "batched_mm")
    named = model.config.architectures
    if named and type(model).__name__ not in named:
        raise UnsupportedModelError(
            f"the library's class is {type(model).__name__}, the checkpoint's {', '.join(named)}"
        )
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(_rotate_here, copy.deepcopy(module))
    model.to("meta")
    with torch.inference_mode(), torch.device("meta"), _noted_masks(model) as masks:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), position_ids=torch.arange(2)[None], use_cache=False)
    text = model.config.get_text_config()
    found = [call["layer"] for call in calls]
    others = sorted(set(range(text.num_hidden_layers)).difference(found))
    if others:
        raise UnsupportedModelError(f"layer {others[0]} does not attend: it has a state of its own, or nothing")
    if len(found) != text.num_hidden_layers:
        raise UnsupportedModelError(f"{text.num_hidden_layers} layers attend {len(found)} times")
    length = _first_of(text, "max_position_embeddings", "seq_length", default=_NO_LENGTH)
    _check_masks(masks, text, length)
    if _WINDOW_MASK in masks and not any(call["sliding_window"] for call in calls):  # masks alone know of it
        _add_windows(calls, text)
    return {
        "architecture": type(model).__name__,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "max_position_embeddings": length,
        "tie_word_embeddings": bool(text.tie_word_embeddings),
        "longrope": longrope(text),
        "layers": calls,
    }


def _check_call(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if Octavo's attention would compute something else."""
    if key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(f"keys of {list(key.shape)} and values of {list(value.shape)} differ")
    if mask is not None:
        raise UnsupportedModelError("attention has a mask of its own")
    if asked := [name for name in _REFUSED if options.get(name) is not None]:
        raise UnsupportedModelError(f"attention has {', '.join(asked)}")
    if False in (options.get("is_causal"), getattr(module, "is_causal", None)):
        raise UnsupportedModelError("tokens attend to later ones")


@contextmanager
def _noted_masks(model: nn.Module) -> Iterator[dict[str, bool]]:
    """Note by name what kinds of masks the library's modules ask for, and whether with functions of their own."""
    noted: dict[str, bool] = {}

    def noting(name: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        noted[name] = noted.get(name, False) or any(options.get(key) is not None for key in _MASK_PARTS)
        return make(*arguments, **options)

    homes = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    made = [(home, name, make) for home in homes.values() for name, make in vars(home).items() if _MASK.fullmatch(name)]
    for home, name, make in made:
        setattr(home, name, partial(noting, name, make))
    try:
        yield noted
    finally:
        for home, name, make in made:
            setattr(home, name, make)


def _check_masks(masks: dict[str, bool], text: Any, length: int) -> None:
    """Raise UnsupportedModelError if attention would see other tokens than all earlier ones, or those in a window.

    Octavo's attention gets no masks, so whatever else they would say was lost without a word.
    """
    for name, has_parts in masks.items():
        if has_parts or "bidirectional" in name:
            raise UnsupportedModelError(f"attention has a mask of its own ({name})")
        if "chunked" in name and (text.attention_chunk_size or length) < length:
            raise UnsupportedModelError(f"attention within chunks of {text.attention_chunk_size} tokens")


def _add_windows(calls: list[dict[str, Any]], text: Any) -> None:
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(calls)
    for call, kind in zip(calls, kinds, strict=True):
        call["sliding_window"] = text.sliding_window if kind == "sliding_attention" else None


def _rotate_here(rotary: Any, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Compute the angles of a step on the meta device with values: some classes look at positions."""
    with torch.device("cpu"):
        positions = torch.arange(position_ids.shape[-1]).expand(position_ids.shape)
        found = rotary(torch.empty(1, dtype=x.dtype), positions, *rest, **options)
    return found.to("meta") if isinstance(found, torch.Tensor) else tuple(part.to("meta") for part in found)


def _first_of(config: Any, *names: str, default: int) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)


def main() -> None:
    """Print the facts about the checkpoint in the folder that the command line names."""
    logging.set_verbosity_error()
    try:
        found = probe(Path(sys.argv[-1]))
    except Exception as error:  # noqa: BLE001 - whatever the library says becomes the user's error
        first = (str(error).splitlines() or [""])[0]
        found = {"error": first if isinstance(error, UnsupportedModelError) else f"{type(error).__name__}: {first}"}
    sys.stdout.write(json.dumps(found) + "\n")
