"""Servers with a fake model, forked from one process that has imported what they need: most of what a start takes.

Each is a child of the process that asks for it, and begins where `program.py` does, with an environment of its own.
Run as `python tests/fakes/fork_server.py DESCRIPTOR`, one end of a socket on which requests for programs come.
"""

import atexit
import ctypes
import functools
import gc
import io
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

import psutil

PROGRAM = str(Path(__file__).with_name("program.py"))
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE = 1 << 20


class ForkedProgram(psutil.Process):
    """`program.py` as a child, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], stderr: int, environ: Mapping[str, str]) -> None:
        message = {"arguments": [PROGRAM, *arguments], "environ": {**environ}, "folder": os.getcwd()}
        _adopt_orphans(True)  # the process between the fork server and the program exits, and the program is ours
        try:
            socket.send_fds(_server(), [json.dumps(message).encode()], [stderr])
            pid = int(_server().recv(_MAX_MESSAGE))
        finally:
            _adopt_orphans(False)
        super().__init__(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        try:
            return self.wait(0)
        except psutil.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill it, if it still runs."""
        with suppress(psutil.NoSuchProcess):
            super().kill()


@functools.cache
def _server() -> socket.socket:
    """Start the fork server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # before the wait
    return ours


def _adopt_orphans(wanted: bool) -> None:
    """Let descendants whose parents exit become children of this process, or of init again."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _fork_for_each(requests: socket.socket) -> bytes:
    """Answer requests for programs with their process ids. Returns in each program, what it was asked for."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MAX_MESSAGE, 1)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            if (program := os.fork()) != 0:
                os.write(writer, str(program).encode())
                os._exit(0)
            os.dup2(descriptors[0], 2)
            for descriptor in (*descriptors, reader, writer):
                os.close(descriptor)
            requests.close()
            return message
        os.waitpid(between, 0)
        requests.send(os.read(reader, _MAX_MESSAGE))
        for descriptor in (*descriptors, reader, writer):
            os.close(descriptor)


def _main() -> None:
    import octavo.engine.inproc_client
    import octavo.server.app  # noqa: F401
    from octavo.cli.main import main

    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = ["octavo", "serve", "demo", "--show-settings"]  # imports what options need
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        main()
    gc.freeze()  # pages that no collection touches are shared
    program = json.loads(_fork_for_each(requests))
    os.environ.clear()
    os.environ.update(program["environ"])
    os.chdir(program["folder"])
    sys.argv[:] = program["arguments"]
    runpy.run_path(PROGRAM, run_name="__main__")


if __name__ == "__main__":
    _main()
