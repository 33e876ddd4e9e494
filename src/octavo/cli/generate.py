"""`octavo generate`: complete prompts from the command line, files or a pipe."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import EngineOptions, SamplingOptions, with_derived_flags
from octavo.cli.terminal import decoded, print_json_line
from octavo.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput


@with_derived_flags
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="text to complete (repeatable)", metavar="<str>")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="file with a prompt (repeatable); - is standard input", metavar="<path>"),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="treat every line of a file or pipe as a prompt")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="send each prompt as a chat message")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one line of JSON per prompt")] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", help="file with a JSON schema that the output must match", metavar="<path>"),
    ] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Complete prompts from flags, files or a pipe."""
    from octavo.sampling_params import SamplingParams
    from octavo.structured_output import StructuredOutput

    prompts = collect_prompts(prompt or [], file or [], by_line=lines)
    sampling.setdefault("max_tokens", 256)
    if json_schema is not None:
        sampling["structured_output"] = StructuredOutput(json_schema=_read(json_schema))
    SamplingParams.from_options(sampling)  # report mistakes before loading the weights
    streams_text = len(prompts) == 1 and sampling.get("n", 1) == 1 and not json
    watch = _text_printer() if streams_text else None
    latest, was_interrupted = asyncio.run(_generate(prompts, chat, sampling, engine, watch))
    outputs = [replace(output, prompt=prompts[index]) for index, output in latest.items()]
    if json:
        import msgspec

        for output in outputs:
            print_json_line(msgspec.json.encode(output).decode())
    elif streams_text:
        print()
    else:
        _print_labeled(outputs)
    if outputs and sys.stderr.isatty():
        _print_summary(outputs)
    raise_first_error(outputs)
    if was_interrupted:
        raise typer.Exit(130)


def collect_prompts(given: Sequence[str], files: Sequence[Path], *, by_line: bool) -> list[str]:
    """Return prompts from flags, then files; from standard input if there are neither.

    Raises InvalidParameterError: a file cannot be read, or there is no prompt.
    """
    texts = [_read(file) for file in files]
    if not given and not files:
        if sys.stdin.isatty():
            raise InvalidParameterError("prompt", None, "use --prompt or --file, or pipe text in")
        texts = [_read(Path("-"))]
    pieces = [line for text in texts for line in (text.splitlines() if by_line else [text.removesuffix("\n")])]
    prompts = [*(decoded(text, "prompt") for text in given), *(piece for piece in pieces if piece)]
    if not prompts:
        raise InvalidParameterError("prompt", "", "must not be empty")
    return prompts


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            return decoded(sys.stdin.read(), "standard input")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("file", str(file), f"cannot be read: {error}") from error


async def _generate(
    prompts: Sequence[str],
    chat: bool,
    sampling: SamplingOptions,
    engine: EngineOptions,
    watch: "Callable[[RequestOutput], None] | None",
) -> "tuple[dict[int, RequestOutput], bool]":
    from octavo import AsyncLLM

    async with AsyncLLM(**engine) as llm:
        params = llm.get_default_sampling_params().replace(**sampling)
        if chat:
            streams = [llm.chat_stream([{"role": "user", "content": prompt}], params) for prompt in prompts]
        else:
            streams = [llm.stream(prompt, params) for prompt in prompts]
        return await follow_all(streams, watch)


async def follow_all(
    streams: "Sequence[AsyncIterator[RequestOutput]]", watch: "Callable[[RequestOutput], None] | None" = None
) -> "tuple[dict[int, RequestOutput], bool]":
    """Consume all streams concurrently; return the latest output of each prompt that has any, by index, in order.

    Ctrl-C cancels this task: requests are aborted, partial outputs returned, and that it happened.
    """
    latest: dict[int, RequestOutput] = {}

    async def follow(index: int, stream: "AsyncIterator[RequestOutput]") -> None:
        async for output in stream:
            latest[index] = output
            if watch is not None:
                watch(output)

    was_interrupted = False
    try:
        await asyncio.gather(*(follow(index, stream) for index, stream in enumerate(streams)))
    except asyncio.CancelledError:
        was_interrupted = True
    return dict(sorted(latest.items())), was_interrupted


def raise_first_error(outputs: "Sequence[RequestOutput]") -> None:
    """A failed request does not affect the others, but the program must not exit with 0."""
    for output in outputs:
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise RequestError(f"prompt {output.prompt!r}: {sample.error}")


def _text_printer() -> "Callable[[RequestOutput], None]":
    """Return a function that streams the text of one request."""
    num_shown = 0

    def show(output: "RequestOutput") -> None:
        nonlocal num_shown
        sys.stdout.write(output.text[num_shown:])
        sys.stdout.flush()
        num_shown = len(output.text)

    return show


def _print_labeled(outputs: "Sequence[RequestOutput]") -> None:
    """Print several texts, each under its prompt; unstyled into a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for number, output in enumerate(outputs, start=1):
        for sample in output.outputs:
            name = f"{number}.{sample.index + 1}" if len(output.outputs) > 1 else str(number)
            console.print(Text(f"[{name}] {output.prompt}", style="bold cyan"))
            console.print(Text(sample.text), end="\n\n")


def _print_summary(outputs: "Sequence[RequestOutput]") -> None:
    """Print the number of tokens and the speed, not counting load time."""
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    starts_s = [output.metrics.arrival_time_s for output in outputs]
    ends_s = [output.metrics.finished_time_s or time.time() for output in outputs]
    elapsed_s = max(ends_s) - min(starts_s)
    rate = num_tokens / elapsed_s
    print(f"{len(outputs)} prompts, {num_tokens} tokens, {elapsed_s:.2f} s, {rate:.0f} tokens/s", file=sys.stderr)
