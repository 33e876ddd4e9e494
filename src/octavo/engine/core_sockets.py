"""Where the sockets between a client and its core process are: at addresses that any `TMPDIR` allows."""

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

_MAX_FOLDER_CHARACTERS = 60  # an address of a Unix socket has at most 104 bytes, the random folder's name included


@dataclass(frozen=True, slots=True)
class CoreSockets:
    """Addresses that only processes of this user can connect to; made by the client, found by its child.

    On Linux they are names in the abstract namespace, which end with the sockets, however their processes die. Any user
    can read and try such a name, so the kernel is asked who connects. Elsewhere they are files in a folder that is
    closed to others, which the client deletes, or the child when its parent was killed.
    """

    prefix: str  # what `ipc://` addresses start with

    @classmethod
    def make(cls, *, is_abstract: bool = sys.platform == "linux") -> Self:
        """Return new addresses."""
        if is_abstract:
            return cls(f"@octavo-{secrets.token_hex(16)}-")
        has_short_paths = len(os.fsencode(tempfile.gettempdir())) <= _MAX_FOLDER_CHARACTERS
        return cls(tempfile.mkdtemp(prefix="octavo-", dir=None if has_short_paths else "/tmp") + os.sep)

    def bind(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Bind the client's side."""
        if self._folder is None:
            socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        socket.bind(f"ipc://{self.prefix}{name}")

    def connect(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Connect the child's side."""
        socket.connect(f"ipc://{self.prefix}{name}")

    def delete(self) -> None:
        """Leave nothing behind. Idempotent."""
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):  # the other process was faster
                shutil.rmtree(self._folder)

    @property
    def _folder(self) -> Path | None:
        return None if self.prefix.startswith("@") else Path(self.prefix)
