"""Relays the output of the engine process to its parent's log, in the parent's format."""

import logging
import threading
from typing import IO

logger = logging.getLogger("octavo.engine.process")


def relay_lines(pipe: IO[bytes]) -> threading.Thread:
    """Log every line from the pipe until the other side closes it; return the thread."""
    thread = threading.Thread(target=_relay, args=(pipe,), name="octavo-engine-log", daemon=True)
    thread.start()
    return thread


def _relay(pipe: IO[bytes]) -> None:
    with pipe:
        for line in pipe:
            logger.warning("%s", line.decode(errors="replace").rstrip())
