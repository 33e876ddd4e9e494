"""Runs a coroutine at once, as far as it goes without waiting. Most writes to a socket never wait, and need no task."""

import asyncio
import types
from collections.abc import Awaitable, Generator
from typing import Any


def start_at_once(work: Awaitable[None]) -> "asyncio.Task[None] | None":
    """Return None when it has ended already; otherwise a task for the rest of it. What it raises at once is raised."""
    steps = work.__await__()
    try:
        waits_for = steps.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_rest(steps, waits_for))


async def _rest(steps: Generator[Any, Any, None], waits_for: object) -> None:
    await _go_on(steps, waits_for)


@types.coroutine
def _go_on(steps: Generator[Any, Any, None], waits_for: object) -> Generator[object, None, None]:
    """Wait for what the work waits for, then let it go on; an exception on the way is its own."""
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancelled task, as a rule; the work has to know
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(None)
    except StopIteration:
        return
