"""`octavo chat`: a conversation in the terminal, with a local model or a server. Ctrl-C stops a response."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.chat_models import ChatModel, local_model, remote_model
from octavo.cli.chat_text import ResponsePrinter
from octavo.cli.images import image_part
from octavo.cli.options import TYPER_SETTINGS, AnswerOptions, EngineOptions, with_derived_flags
from octavo.cli.streams import decoded
from octavo.errors import EngineDeadError, InvalidParameterError, OctavoError, nearest_hint

app = typer.Typer(**TYPER_SETTINGS)


@app.command()
@with_derived_flags
def chat(
    system: Annotated[str | None, typer.Option("--system", help="system prompt", metavar="<str>")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="chat with a model on this OpenAI-compatible server", metavar="<url>")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key for that server", metavar="<str>")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="picture to send with the first message (repeatable)", metavar="<path>"),
    ] = None,
    *,
    sampling: AnswerOptions,
    engine: EngineOptions,
) -> None:
    """Chat with a model. Type /help for the commands."""
    from octavo.sampling_params import SamplingParams

    SamplingParams.from_options(sampling)  # report mistakes before loading the weights
    if url is None and api_key is not None:
        raise InvalidParameterError("api_key", "...", "has no effect without --url")
    model = local_model(engine, sampling) if url is None else remote_model(url, api_key, engine, sampling)
    parts = [image_part(path) for path in image or []]
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            ChatSession(runner.run(stack.enter_async_context(model)), runner, system, parts).run()
        finally:
            runner.run(stack.aclose())


class Conversation:
    """The messages so far, always ready to send: an optional system message, then alternating turns."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self._turns: list[dict[str, object]] = []

    @property
    def messages(self) -> list[Mapping[str, object]]:
        opening = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*opening, *self._turns]

    def ask(self, text: str, images: Sequence[Mapping[str, object]] = ()) -> None:
        """Add a question, with images before its text."""
        content = [*images, {"type": "text", "text": text}] if images else text
        self._turns.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Add the response. If it is empty, remove the question instead, so that turns still alternate."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def reset(self) -> None:
        self._turns.clear()

    def set_system(self, text: str) -> None:
        self._system = text or None
        self._turns.clear()


class ChatSession:
    """Reads and handles one line at a time, until the end of input or `/exit`."""

    def __init__(
        self,
        answer: ChatModel,
        runner: asyncio.Runner,
        system: str | None,
        images: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._ask_model = answer
        self._runner = runner
        self._conversation = Conversation(system)
        self._images = list(images)  # for the next message
        self._is_over = False
        self._num_lines = 0  # read so far
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "show this list"),
            "image": (self._image, "send the picture in the given file with the next message"),
            "reset": (self._reset, "clear the conversation"),
            "system": (self._system, "start a new conversation with the given system prompt"),
            "exit": (self._exit, "quit (or press Ctrl-D)"),
        }

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # not on every platform; only needed for line editing
                import readline  # noqa: F401 - input() edits lines once it is imported
            _note("Type a message; /help lists commands. Ctrl-C stops a response, Ctrl-D quits.")
        while not self._is_over:
            try:
                self._handle(self._read_line())
            except EOFError:
                break
            except KeyboardInterrupt:
                _note("\ntype /exit or press Ctrl-D to quit")

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name in self._commands:
                self._commands[name][0](rest.strip())
            else:
                _note(f"unknown command /{name}; {nearest_hint(name, list(self._commands))}")
        elif line.strip():
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Send a message and stream the response; Ctrl-C keeps what was shown."""
        self._conversation.ask(line, self._images)
        self._images = []
        printer = ResponsePrinter()
        try:
            self._runner.run(self._listen(printer))
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except EngineDeadError:
            raise
        except OctavoError as error:
            _note(str(error))
        print(flush=True)
        self._conversation.answer(printer.text)

    async def _listen(self, printer: ResponsePrinter) -> None:
        async for piece in self._ask_model(self._conversation.messages):
            printer.show(piece)

    def _help(self, _rest: str) -> None:
        for name, (_, text) in self._commands.items():
            _note(f"/{name:<8} {text}")

    def _image(self, rest: str) -> None:
        try:
            self._images.append(image_part(Path(rest)))
        except InvalidParameterError as error:
            _note(str(error))
        else:
            _note(f"{len(self._images)} to send with the next message")

    def _reset(self, _rest: str) -> None:
        self._conversation.reset()
        _note("conversation cleared")

    def _system(self, rest: str) -> None:
        self._conversation.set_system(rest)
        _note("new conversation started")

    def _exit(self, _rest: str) -> None:
        self._is_over = True

    def _read_line(self) -> str:
        """Return the next message; a backslash at the end of a line continues it on the next."""
        line = self._input("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._input(". ")
        return line

    def _input(self, prompt: str) -> str:
        self._num_lines += 1
        return decoded(input(prompt if sys.stdin.isatty() else ""), "standard input", first_line=self._num_lines)


def _note(text: Any) -> None:
    """Print a notice, as opposed to model output."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text, style="dim", markup=False)
