"""`answer_lines`: the lines of a batch without a server, by an engine in the caller's program."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import EngineDeadError, InvalidParameterError
from octavo.server.args import ServerArgs
from octavo.server.batches.input import InputLine, LineReader, read_line
from octavo.server.batches.lines import InterruptedLineError, LineAnswerer, ReadLine
from octavo.server.batches.protocol import LineResult
from octavo.server.batches.slots import BatchSlots
from octavo.server.openai.service import OpenAICompatibleService


async def answer_lines(
    path: Path,
    lines: Sequence[InputLine],
    keep: Callable[[LineResult], None],
    *,
    engine: AsyncLLMEngine,
    model_name: str,
    args: ServerArgs,
    max_running: int | None,
) -> None:
    """Answer lines of a checked file, and pass each result to `keep`, in the order in which they finish.

    `max_running` is the number of samples in flight; None: as many as the engine runs. Raises EngineDeadError; what
    `keep` raises; InvalidParameterError: the file has changed since it was checked, or an adapter cannot be used.
    """
    service = OpenAICompatibleService(engine, model_name, args)
    await service.models.add_modules(args.lora_modules)
    answerer = LineAnswerer(lambda _: contextlib.nullcontext(service), args)
    config = engine.front.config
    limit = max_running or config.scheduler.max_num_seqs * config.parallel.data_parallel_size
    slots = BatchSlots(limit, limit, lambda: 0)

    async def answer(line: ReadLine) -> None:
        keep(await answerer.answer(line))

    def release(num_samples: int, _: "asyncio.Task[None]") -> None:
        slots.give_back(num_samples)

    with contextlib.closing(LineReader(path)) as reader:
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    read = await asyncio.to_thread(_read, answerer, reader, line, path)
                    await slots.take(read.num_samples)
                    group.create_task(answer(read)).add_done_callback(partial(release, read.num_samples))
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise EngineDeadError(str(first)) if isinstance(first, InterruptedLineError) else first from None


def _read(answerer: LineAnswerer, reader: LineReader, line: InputLine, path: Path) -> ReadLine:
    try:
        return answerer.read(read_line(reader.read(line)))
    except msgspec.MsgspecError as error:
        raise InvalidParameterError(
            "file", str(path), f"line {line.line + 1} has changed meanwhile: {error}"
        ) from error
