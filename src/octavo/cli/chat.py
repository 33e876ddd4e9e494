"""`octavo chat`: a conversation in the terminal, with a local model or a server. Ctrl-C stops a response."""

import asyncio
import base64
import mimetypes
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import AnswerOptions, EngineOptions, with_derived_flags
from octavo.cli.terminal import decoded
from octavo.errors import EngineDeadError, InvalidParameterError, OctavoError, nearest_hint

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config.engine import EngineConfig
    from octavo.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, object]]
ChatModel = Callable[[Messages], AsyncIterator[tuple[str, bool]]]  # pieces of text, and whether they are reasoning
# llama.cpp's. Without any, small models answer from the whole vocabulary; the API keeps to what requests say.
TERMINAL_SAMPLING = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05})
COMMANDS = {
    "help": "show this list",
    "image": "send the picture in the given file with the next message",
    "reset": "clear the conversation",
    "system": "start a new conversation with the given system prompt",
    "exit": "quit (or press Ctrl-D)",
}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


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
    model = _local_model(engine, sampling) if url is None else _remote_model(url, api_key, engine, sampling)
    parts = [_image_part(path) for path in image or []]
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            ChatSession(runner.run(stack.enter_async_context(model)), runner, system, parts).run()
        finally:
            runner.run(stack.aclose())


@asynccontextmanager
async def _local_model(engine: EngineOptions, sampling: AnswerOptions) -> AsyncIterator[ChatModel]:
    from octavo import AsyncLLM

    async with AsyncLLM(**engine) as llm:
        engine_config = (await llm.engine()).front.config
        params = chat_params(llm.get_default_sampling_params(), engine_config, sampling)
        yield lambda messages: stream_local(llm, params, messages)


@asynccontextmanager
async def _remote_model(
    url: str, api_key: str | None, engine: EngineOptions, sampling: AnswerOptions
) -> AsyncIterator[ChatModel]:
    """A model on a server, whose engine is already configured."""
    from octavo.cli.client import HttpClient

    for name in engine:
        if name != "model_name":
            raise InvalidParameterError(name, engine[name], "has no effect with --url: it is set on the server")
    async with HttpClient(url, api_key=api_key) as client:
        model = await client.find_model(engine.get("model_name"))
        yield lambda messages: client.stream_chat(model, messages, sampling)


def chat_params(defaults: "SamplingParams", config: "EngineConfig", sampling: AnswerOptions) -> "SamplingParams":
    """Return the parameters of answers: what was given, else the checkpoint's, else those of chats in a terminal."""
    generation = config.model.generation
    names_none = config.use_generation_config and all(getattr(generation, name) is None for name in TERMINAL_SAMPLING)
    added = {name: value for name, value in TERMINAL_SAMPLING.items() if names_none and name not in sampling}
    if added and sampling.get("temperature") != 0:
        listed = ", ".join(f"{name} {value}" for name, value in added.items())
        print(f"The model names no sampling parameters, so the chat starts from {listed}.", file=sys.stderr)
    return defaults.replace(**{"max_tokens": None, **added, **sampling})


async def stream_local(
    llm: "AsyncLLM", params: "SamplingParams", messages: Messages
) -> AsyncIterator[tuple[str, bool]]:
    """Yield what each output adds to the previous one."""
    num_shown = 0
    async for output in llm.chat_stream(messages, params):
        yield output.text[num_shown:], False
        num_shown = len(output.text)


def _image_part(path: Path) -> dict[str, object]:
    """Return the content part of an image file. Its contents are checked by the engine or the server.

    Raises InvalidParameterError: it cannot be read.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidParameterError("image", str(path), f"cannot be read: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


class ChatSession:
    """Reads one line at a time and obeys or sends it, until the end of input or `/exit`.

    The turns alternate and are always ready to send: a question whose response is empty leaves none.
    """

    def __init__(
        self,
        model: ChatModel,
        runner: asyncio.Runner,
        system: str | None,
        images: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._model = model
        self._runner = runner
        self._system_prompt = system
        self._turns: list[dict[str, object]] = []
        self._images = list(images)  # for the next message
        self._num_lines = 0  # read so far

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # not on every platform; only needed for line editing
                import readline  # noqa: F401 - input() edits lines once it is imported
            _note("Type a message; /help lists commands. Ctrl-C stops a response, Ctrl-D quits.")
        while True:
            try:
                line = self._read_line()
                if line.startswith("/"):
                    name, _, rest = line[1:].partition(" ")
                    self._obey(name, rest.strip())
                elif line.strip():
                    self._answer(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                _note("\ntype /exit or press Ctrl-D to quit")

    def _obey(self, command: str, rest: str) -> None:
        match command:
            case "help":
                for name, text in COMMANDS.items():
                    _note(f"/{name:<8} {text}")
            case "image":
                try:
                    self._images.append(_image_part(Path(rest)))
                except InvalidParameterError as error:
                    _note(str(error))
                else:
                    _note(f"{len(self._images)} to send with the next message")
            case "reset":
                self._turns.clear()
                _note("conversation cleared")
            case "system":
                self._system_prompt = rest or None
                self._turns.clear()
                _note("new conversation started")
            case "exit":
                raise EOFError
            case _:
                _note(f"unknown command /{command}; {nearest_hint(command, list(COMMANDS))}")

    def _answer(self, line: str) -> None:
        """Send a message and stream the response; Ctrl-C keeps what was shown."""
        content = [*self._images, {"type": "text", "text": line}] if self._images else line
        self._images = []
        self._turns.append({"role": "user", "content": content})
        shown: list[str] = []
        try:
            self._runner.run(self._show_response(shown))
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except EngineDeadError:
            raise
        except OctavoError as error:
            _note(str(error))
        print(flush=True)
        if text := "".join(shown):
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    async def _show_response(self, shown: list[str]) -> None:
        """Stream a response, with dimmed reasoning; collect the rest, as models do not get their reasoning back."""
        opening = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        can_dim, was_reasoning = sys.stdout.isatty(), False
        async for text, is_reasoning in self._model([*opening, *self._turns]):
            if was_reasoning and not is_reasoning:
                print("\n")
            was_reasoning = is_reasoning
            if not is_reasoning:
                shown.append(text)
            print(f"{_DIM}{text}{_PLAIN}" if is_reasoning and can_dim else text, end="", flush=True)

    def _read_line(self, prompt: str = "> ") -> str:
        """Return the next message; a backslash at the end of a line continues it on the next."""
        self._num_lines += 1
        line = decoded(input(prompt if sys.stdin.isatty() else ""), "standard input", first_line=self._num_lines)
        return line[:-1] + "\n" + self._read_line(". ") if line.endswith("\\") else line


def _note(text: Any) -> None:
    """Print a notice, as opposed to model output."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text, style="dim", markup=False)
