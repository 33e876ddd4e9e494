"""What the engine's process says goes through the log of its parent, in whatever format that has."""

import logging
import threading
from typing import IO

logger = logging.getLogger("octavo.engine.process")


def relay_lines(pipe: IO[bytes]) -> threading.Thread:
    """Log every line that comes through the pipe; the thread ends, and closes it, when the other side is gone."""
    thread = threading.Thread(target=_relay, args=(pipe,), name="octavo-engine-log", daemon=True)
    thread.start()
    return thread


def _relay(pipe: IO[bytes]) -> None:
    with pipe:
        for line in pipe:
            logger.warning("%s", line.decode(errors="replace").rstrip())
