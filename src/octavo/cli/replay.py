"""`octavo replay`: computes requests of a server's request log again, and shows that the answers are the same bytes."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import EngineOptions, RequestOptions, with_derived_flags
from octavo.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    from octavo.server.logged.answer_diff import TokenDifference
    from octavo.server.logged.replay import Comparison
    from octavo.server.logged.requests import Facts, Identity, LoggedRequest, LogReader
    from octavo.tokenizer.tokenizer import Tokenizer


@with_derived_flags
def replay(
    request_log: Annotated[
        Path, typer.Option("--request-log", "--journal", help="folder of the server's --request-log", metavar="DIR")
    ],
    request_id: Annotated[
        list[str] | None,
        typer.Argument(help="id of an answer, or X-Request-Id of a response", metavar="REQUEST_ID", show_default=False),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="show what is in the log, the oldest first, and exit")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="replay all requests of the log")] = False,
    *,
    requests: RequestOptions,
    engine: EngineOptions,
) -> None:
    """Compute requests of a request log again, with a model in this program, and compare the answers.

    `octavo serve --request-log DIR` writes the log. A request gets the seed, ids and time that it had; model and
    options are the server's, unless they are given here. Answers are equal byte for byte, or the first place is shown
    where they differ, and what else is not as it was: version, device and kernels, weights, options. Not compared are
    cached_tokens, system_fingerprint and the turns that choices of a stream take.

    Exit codes: 0 all are equal, 1 some differ, 2 some cannot be computed: an unknown id, another model.
    """
    from octavo.server.logged.requests import LogReader

    with contextlib.closing(LogReader(request_log)) as log:
        if list_all:
            for number, facts in log.facts():
                print(_listed(number, facts))
            return
        if bool(request_id) == every:
            raise InvalidParameterError("request_id", request_id or [], "give ids, or --all, or --list")
        numbers = [number for number, _ in log.facts()] if every else _numbers_of(log, request_id or [])
        found = asyncio.run(_replay(log, numbers, engine, requests))
    if found["cannot"]:
        raise InvalidParameterError("request_id", found["cannot"][0], f"{len(found['cannot'])} cannot be computed here")
    if found["differs"]:
        raise RequestError(f"{len(found['differs'])} of {len(numbers)} answers differ")


def _numbers_of(log: "LogReader", names: Sequence[str]) -> list[int]:
    """Return the numbers of requests, each once. Raises InvalidParameterError: one is unknown."""
    return list(dict.fromkeys(number for name in names for number in log.numbers_of(name)))


async def _replay(
    log: "LogReader", numbers: Sequence[int], engine: EngineOptions, requests: RequestOptions
) -> dict[str, list[str]]:
    """Replay requests one after another, with an engine for those of equal options; return names by verdict."""
    found: dict[str, list[str]] = {"equal": [], "differs": [], "cannot": []}
    keys = {number: logged.identity for number in numbers if (logged := log.read(number)) is not None}
    in_turn = sorted(keys, key=lambda number: repr(_options_of(keys[number])))
    for _, group in groupby(in_turn, key=lambda number: repr(_options_of(keys[number]))):
        same = list(group)
        await _replay_alike(log, same, keys[same[0]], engine, requests, found)
    return found


def _options_of(identity: "Identity") -> tuple[object, ...]:
    return identity.path, identity.model, identity.settings


async def _replay_alike(
    log: "LogReader",
    numbers: Sequence[int],
    logged_identity: "Identity",
    engine: Mapping[str, Any],
    requests: Mapping[str, Any],
    found: dict[str, list[str]],
) -> None:
    """Replay requests of one identity."""
    from octavo import AsyncLLM
    from octavo.server.args import ServerArgs
    from octavo.server.logged.replay import compare
    from octavo.server.logged.replay import replay as compute
    from octavo.server.logged.requests import ENGINE_SETTINGS, SERVER_SETTINGS, Identity
    from octavo.server.openai.service import OpenAICompatibleService

    settings = logged_identity.settings
    options = {name: settings[name] for name in ENGINE_SETTINGS if name in settings} | dict(engine)
    model = options.pop("model_name", logged_identity.model)
    where = model if "model_name" in engine or not Path(logged_identity.path).exists() else logged_identity.path
    chosen = {name: settings[name] for name in SERVER_SETTINGS if name in settings} | dict(requests)
    server_options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}
    args = ServerArgs(**server_options)
    async with AsyncLLM(where, **options) as llm:
        running = await llm.engine()
        service = OpenAICompatibleService(running, model, args)
        await service.models.add_modules(args.lora_modules)
        now = await asyncio.to_thread(Identity.of, running.front, model, options | chosen)
        for number in numbers:
            if (logged := log.read(number)) is None:
                continue
            comparison = compare(logged, await compute(service, logged))
            found[comparison.verdict].append(_name(logged.facts))
            for line in _report(number, logged, comparison, now, running.front.tokenizer):
                print(line, flush=True)


def _report(
    number: int, logged: "LoggedRequest", comparison: "Comparison", now: "Identity", tokenizer: "Tokenizer"
) -> list[str]:
    lines = [f"{_listed(number, logged.facts)}: {comparison.text}"]
    if (tokens := comparison.token_difference) is not None:
        lines.append(f"  choice {tokens.choice}, token {tokens.position}: {_tokens(tokens, tokenizer)}")
    if (difference := comparison.difference) is not None:
        at = "" if difference.position is None else f", character {difference.position}"
        lines += [
            f"  {difference.where}{at}:",
            f"    logged:   {difference.logged}",
            f"    replayed: {difference.replayed}",
        ]
    if comparison.verdict == "equal":
        return lines
    if comparison.verdict == "differs" and tokens is None and difference is not None and difference.where != "status":
        lines.append("  all tokens are equal")
    others = logged.identity.differences(now)
    lines += [f"  {name} was {_value(pair[0])}, is {_value(pair[1])}" for name, pair in others.items()]
    return lines if others else [*lines, "  version, device, kernels, weights and options are as they were"]


def _value(value: object) -> str:
    return "the default" if value is None else repr(value)


def _tokens(tokens: "TokenDifference", tokenizer: "Tokenizer") -> str:
    shown = ["no more" if t is None else f"{t} {tokenizer.token_text(t)!r}" for t in (tokens.logged, tokens.replayed)]
    return f"logged {shown[0]}, replayed {shown[1]}"


def _name(facts: "Facts") -> str:
    return facts.reply_id or facts.request_id


def _listed(number: int, facts: "Facts") -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.started_s))
    tokens = f"{facts.num_prompt_tokens}+{facts.num_output_tokens} tokens"
    kind = "stream" if facts.is_stream else "whole"
    took = f"{facts.ended_s - facts.started_s:.2f} s"
    ids = facts.request_id if not facts.reply_id else f"{facts.reply_id} ({facts.request_id})"
    return f"{number} {when} {ids} {facts.path} {kind} {facts.status} {tokens} {took}"
