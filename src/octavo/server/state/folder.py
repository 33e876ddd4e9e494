"""Folders for what outlives the server: their user's only; that of `--state-dir` is owned by one server at a time."""

import fcntl
import logging
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import InvalidParameterError

logger = logging.getLogger(__name__)

_LOCK_NAME = "lock"
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def private_folder(option: str, path: str) -> Path:
    """Create a folder with mode 0700 if it is missing, or warn that others may enter it.

    Raises InvalidParameterError, which names the option: it cannot be used.
    """
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode) & _FOR_OTHERS
    except OSError as error:
        raise InvalidParameterError(option, path, f"cannot be used: {error.strerror or error}") from error
    if mode:
        logger.warning("others may enter the folder of %s, %s (mode %03o of 077): chmod 700 it", option, path, mode)
    return folder


@contextmanager
def holding_state_dir(path: str | None) -> Generator[None, None, None]:
    """Create the folder if it is missing, and keep other servers out of it during the block.

    The kernel gives the lock back however the process ends. Without a path nothing happens.

    Raises InvalidParameterError: another server has it, or it cannot be created or written.
    """
    if path is None:
        yield
        return
    folder = private_folder("state_dir", path)
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidParameterError("state_dir", path, f"cannot be used: {error.strerror or error}") from error
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        raise InvalidParameterError("state_dir", path, f"in use by another server (process {holder})") from None
    except OSError as error:  # some network file systems have no locks
        raise InvalidParameterError("state_dir", path, f"cannot be locked: {error.strerror or error}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
