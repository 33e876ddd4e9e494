"""The `octavo` program, forked from one process that has imported what it needs: most of what a start takes.

Each is a child of the process that asks for it, and begins where `program.py` or `octavo` does, with its environment.
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
import signal
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


class ForkedProgram:
    """`octavo`, or `program.py`, as a child, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], stderr: int, environ: Mapping[str, str], *, has_model: bool) -> None:
        program = "octavo" if has_model else PROGRAM
        message = {"arguments": [program, *arguments], "environ": {**environ}, "folder": os.getcwd()}
        _adopt_orphans(True)  # the process between the fork server and the program exits, and the program is ours
        try:
            socket.send_fds(_server(), [json.dumps(message).encode()], [stderr])
            self.pid = int(_server().recv(_MAX_MESSAGE))
        finally:
            _adopt_orphans(False)
        self._process = psutil.Process(self.pid)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit code, negative for a signal, once it has ended."""
        code: int = self._process.wait(timeout_s)
        return code

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        try:
            return self.wait(0)
        except psutil.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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
    import octavo.server.app  # noqa: F401 - for those that are forked
    from octavo.cli.main import main

    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = ["octavo", "serve", "demo", "--show-settings"]  # imports what options need
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        main()
    gc.freeze()  # pages that no collection touches are shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who asks
    program = json.loads(_fork_for_each(requests))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program["environ"])
    os.chdir(program["folder"])
    sys.argv[:] = program["arguments"]
    if sys.argv[0] == PROGRAM:
        runpy.run_path(PROGRAM, run_name="__main__")
    else:
        main()


if __name__ == "__main__":
    _main()
