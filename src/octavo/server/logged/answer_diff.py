"""Where two answers to one request differ: in which choice, token and character.

Not compared is what the same computation may have different: cached tokens in the usage, the turns in which a
stream's choices take, and `system_fingerprint`, which says what has computed the answer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_AROUND = 30  # characters before and after a difference
_MAX_SHOWN = 200
_NO_CHOICE = -1  # events of the whole stream
_MISSING = object()
_CACHED_TOKENS = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|input_tokens)":\d+')
_FINGERPRINT = re.compile(rb'"system_fingerprint":"[^"]*"')


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place at which answers differ."""

    where: str  # path in the JSON, such as `choices[0].message.content`
    position: int | None = None  # character in a text
    logged: str
    replayed: str


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens that differ; None: there are no more."""

    choice: int
    position: int
    logged: int | None
    replayed: int | None


def first_difference(logged: bytes, replayed: bytes, *, is_stream: bool, is_partial: bool = False) -> Difference | None:
    """Compare two answers; None: they are equal.

    `is_partial`: the logged one was cut short, and is compared as far as it goes.
    """
    if not is_stream:
        return _find(_comparable(msgspec.json.decode(logged)), _comparable(msgspec.json.decode(replayed)), "")
    before, after = _events_by_choice(logged), _events_by_choice(replayed)
    several = len({*before, *after} - {_NO_CHOICE}) > 1
    for choice in sorted({*before, *after}, key=lambda each: (each == _NO_CHOICE, each)):
        ours, theirs = before.get(choice, []), after.get(choice, [])
        if is_partial:
            theirs = theirs[: len(ours)]
        if several and choice != _NO_CHOICE:  # counts the tokens of all choices so far
            ours, theirs = ([{**event, "usage": None} for event in events] for events in (ours, theirs))
        if ours != theirs:
            name = "" if choice == _NO_CHOICE else f"choices[{choice}]"
            if choice != _NO_CHOICE:
                found = _find(_joined(ours), _joined(theirs), name)
                if found is not None:
                    return found
            return _find(ours, theirs, f"{name} events".lstrip())
    return None


def uncompared_differences(logged: bytes, replayed: bytes) -> list[str]:
    """Return what of the above two equal answers have different, in words."""
    patterns = {"cached_tokens": _CACHED_TOKENS, "system_fingerprint": _FINGERPRINT}
    found = [name for name, pattern in patterns.items() if pattern.findall(logged) != pattern.findall(replayed)]
    plain = [_FINGERPRINT.sub(b"", _CACHED_TOKENS.sub(b"", answer)) for answer in (logged, replayed)]
    return found + (["the turns of its choices"] if plain[0] != plain[1] else [])


def first_token_difference(
    logged: Sequence[Sequence[int]], replayed: Sequence[Sequence[int]], *, is_partial: bool = False
) -> TokenDifference | None:
    """Compare the tokens of each choice; None: they are equal. `is_partial` as above."""
    for choice, ours in enumerate(logged):
        theirs = replayed[choice] if choice < len(replayed) else []
        num_common = min(len(ours), len(theirs))
        if is_partial and len(ours) == num_common:
            theirs = theirs[:num_common]
        position = next((at for at in range(num_common) if ours[at] != theirs[at]), num_common)
        if position < max(len(ours), len(theirs)):
            ends = [tokens[position] if position < len(tokens) else None for tokens in (ours, theirs)]
            return TokenDifference(choice=choice, position=position, logged=ends[0], replayed=ends[1])
    return None


def _events_by_choice(answer: bytes) -> dict[int, list[Any]]:
    """Return the events of a stream, those of each choice in order."""
    events: dict[int, list[Any]] = {}
    for frame in answer.split(b"\n\n"):
        data = frame.partition(b"data: ")[2]  # after the name of the event, if it has one
        if data:
            event = data.decode() if data == b"[DONE]" else _comparable(msgspec.json.decode(data))
            choices = event.get("choices") if isinstance(event, dict) else None
            events.setdefault(choices[0]["index"] if choices else _NO_CHOICE, []).append(event)
    return events


def _comparable(value: Any) -> Any:
    """Return the JSON without what the same computation may have different."""
    if not isinstance(value, dict):
        return value
    value.pop("system_fingerprint", None)
    for part in (value, value.get("message")):  # the start of a stream of Anthropic's has the usage within
        usage = part.get("usage") if isinstance(part, dict) else None
        if not isinstance(usage, dict):
            continue
        if isinstance(usage.get("prompt_tokens_details"), dict):
            usage["prompt_tokens_details"].pop("cached_tokens", None)
        if usage.pop("cache_read_input_tokens", None) is not None:
            usage.pop("input_tokens", None)  # those that are not cached
    return value


def _joined(events: Sequence[Mapping[str, Any]]) -> Any:
    """Return the choice that a stream's events of it make."""
    whole: Any = None
    for event in events:
        whole = _merged(whole, event["choices"][0])
    return whole


def _merged(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _merged(old.get(key), new.get(key)) for key in {**old, **new}}
    if not (isinstance(old, list) and isinstance(new, list)):
        return new
    parts = old + new
    if not all(isinstance(part, dict) and "index" in part for part in parts):
        return parts
    by_index: dict[int, Any] = {}
    for part in parts:  # of tool calls
        by_index[part["index"]] = _merged(by_index.get(part["index"]), part)
    return list(by_index.values())


def _find(ours: Any, theirs: Any, path: str) -> Difference | None:
    """Return the first difference between two JSON values, depth first; None: they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {**ours, **theirs}
        pairs = [(ours.get(n, _MISSING), theirs.get(n, _MISSING), f"{path}.{n}".lstrip(".")) for n in names]
    elif isinstance(ours, list) and isinstance(theirs, list):
        pairs = [
            (ours[at] if at < len(ours) else _MISSING, theirs[at] if at < len(theirs) else _MISSING, f"{path}[{at}]")
            for at in range(max(len(ours), len(theirs)))
        ]
    elif isinstance(ours, str) and isinstance(theirs, str):
        return None if ours == theirs else _text_difference(ours, theirs, path)
    elif ours is not _MISSING and ours == theirs:
        return None
    else:
        return Difference(where=path, logged=_shown(ours), replayed=_shown(theirs))
    return next((found for pair in pairs if (found := _find(*pair)) is not None), None)


def _text_difference(ours: str, theirs: str, path: str) -> Difference:
    num_common = min(len(ours), len(theirs))
    at = next((each for each in range(num_common) if ours[each] != theirs[each]), num_common)
    return Difference(where=path, position=at, logged=_around(ours, at), replayed=_around(theirs, at))


def _around(text: str, at: int) -> str:
    first, last = max(0, at - _AROUND), at + _AROUND
    shown = repr(text[first:last])
    return f"{'...' if first else ''}{shown}{'...' if last < len(text) else ''}"


def _shown(value: Any) -> str:
    text = "(nothing)" if value is _MISSING else msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
