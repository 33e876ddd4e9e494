"""`octavo batch run`: the lines of a batch, offline, with a model in this program."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import TYPER_SETTINGS, EngineOptions, RequestOptions, with_derived_flags
from octavo.cli.result_file import ResultFile
from octavo.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    from octavo.server.args import ServerArgs
    from octavo.server.batches.input import InputLine
    from octavo.server.batches.protocol import LineError, LineResult

_MAX_SHOWN = 20  # mistakes in a file

batch = typer.Typer(**{**TYPER_SETTINGS, "no_args_is_help": True})


@batch.callback()
def _batch() -> None:
    """Answer a file of requests, in the format of OpenAI's batches."""


@batch.command()
@with_derived_flags
def run(
    file: Annotated[Path, typer.Argument(help="JSON lines with custom_id, method, url and body", metavar="FILE")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="file for the results; what it has is not computed again")
    ],
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running", help="samples that run at once [default: --max-num-seqs]", min=1, show_default=False
        ),
    ] = None,
    *,
    requests: RequestOptions,
    engine: EngineOptions,
) -> None:
    """Answer the lines of FILE, and add each result to the output as it is ready.

    A line is a request to /v1/chat/completions, /v1/completions or /v1/embeddings, validated and answered as
    `octavo serve` does. Results are in the order in which they finish, errors among them; the exit code is 1 if there
    are any. After an interruption of any kind the same command goes on: whole lines of the output stay, a torn last
    one is cut, and lines whose custom_id has a result are skipped.
    """
    from octavo.server.args import ServerArgs

    options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in requests.items()}
    args = ServerArgs(**options)
    if args.lora_modules and not engine.get("enable_lora"):
        raise InvalidParameterError("lora_modules", args.lora_modules, "requires --enable-lora")
    lines = read_input(file, args.max_body_bytes)
    if output.exists() and output.samefile(file):
        raise InvalidParameterError("output", str(output), "must not be the input")
    with contextlib.closing(ResultFile(output, {line.custom_id for line in lines})) as results:
        left = [line for line in lines if line.custom_id not in results.finished]
        was_interrupted = bool(left) and asyncio.run(_answer(file, left, results, args, engine, max_running))
        print(_summary(len(lines), results, output), file=sys.stderr)
    if was_interrupted:
        raise typer.Exit(130)
    if results.num_failed:
        raise RequestError(f"{results.num_failed} of {len(lines)} lines have errors")


def read_input(file: Path, max_line_bytes: int) -> "list[InputLine]":
    """Return the lines of a file. Raises InvalidParameterError: it cannot be read, or names its mistakes by line."""
    from octavo.server.batches.input import check_input
    from octavo.server.openai.service import ENDPOINTS

    try:
        lines, errors = check_input(file, ENDPOINTS, max_lines=2**31, max_line_bytes=max_line_bytes)
    except OSError as error:
        raise InvalidParameterError("file", str(file), f"cannot be read: {error.strerror or error}") from error
    if errors:
        raise InvalidParameterError("file", str(file), _in_words(errors))
    return lines


async def _answer(
    file: Path,
    lines: "Sequence[InputLine]",
    results: ResultFile,
    args: "ServerArgs",
    engine: EngineOptions,
    max_running: int | None,
) -> bool:
    """Answer lines; return whether Ctrl-C has ended that early."""
    import msgspec
    from tqdm import tqdm

    from octavo import AsyncLLM
    from octavo.config.args import DEFAULT_MODEL
    from octavo.server.batches.lines import is_failed
    from octavo.server.batches.offline import answer_lines

    def keep(result: "LineResult") -> None:
        results.add(result.custom_id, msgspec.json.encode(result), is_failed=is_failed(result))
        progress.update()

    num_finished = len(results.finished)
    try:
        async with AsyncLLM(**engine) as llm:
            # Without a terminal there is no bar.
            with tqdm(total=num_finished + len(lines), initial=num_finished, unit=" lines", disable=None) as progress:
                await answer_lines(
                    file, lines, keep, engine=await llm.engine(), args=args, max_running=max_running,
                    model_name=engine.get("model_name", DEFAULT_MODEL),
                )  # fmt: skip
    except asyncio.CancelledError:
        return True
    return False


def _summary(num_lines: int, results: ResultFile, output: Path) -> str:
    num_answered = len(results.finished) - results.num_failed
    num_left = num_lines - len(results.finished)
    left = f", {num_left} left" if num_left else ""
    return f"{num_lines} lines: {num_answered} answered, {results.num_failed} with errors{left}; {output}"


def _in_words(errors: "Sequence[LineError]") -> str:
    shown = [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:_MAX_SHOWN]]
    more = [f"and {len(errors) - _MAX_SHOWN} more"] if len(errors) > _MAX_SHOWN else []
    return "\n  ".join(["is not the input of a batch:", *shown, *more]) if len(errors) > 1 else shown[0]
