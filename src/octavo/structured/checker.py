"""Has forms tried in a process of their own, and remembers those that were found good."""

import contextlib
import subprocess
import sys
import threading

import msgspec

from octavo.errors import GrammarTooComplexError, InvalidParameterError, RequestError
from octavo.structured.trial import Verdict
from octavo.structured_output import StructuredOutput

MAX_REMEMBERED = 256
_CLOSE_S = 5.0
# How a process ends that a form was too much for: past its work, out of memory, out of stack. Negative: by a signal.
_KILLED_BY_A_FORM = frozenset({-27, -6, -9, -11})  # SIGPROF, SIGABRT, SIGKILL, SIGSEGV


class FormChecker:
    """May be shared by threads. The process is started with the first form, in 0.2 s, and again after one killed it."""

    def __init__(self) -> None:
        self._good: dict[StructuredOutput, None] = {}  # oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, form: StructuredOutput) -> None:
        """Raise when no answer can be held to `form`. May take seconds for one that was made to hurt.

        Raises:
            InvalidParameterError: with the place of the fault.
            GrammarTooComplexError: to find out takes too long, or too much memory.
        """
        with self._lock:
            if form not in self._good:
                self._try(form)
            self._good.pop(form, None)
            self._good[form] = None
            if len(self._good) > MAX_REMEMBERED:
                del self._good[next(iter(self._good))]

    def close(self) -> None:
        """End the process; it comes back when it is needed."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _try(self, form: StructuredOutput) -> None:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(form) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise _death(form, self._end(process))
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.field:
            raise InvalidParameterError(verdict.field, verdict.value, verdict.limit)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:  # somebody else ended it
            self._end(self._process)
        if self._process is None:
            self._process = _start()
        return self._process

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the end of the process; return how it ended."""
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it was too dead to read
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "octavo.structured.trial"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _death(form: StructuredOutput, returncode: int) -> GrammarTooComplexError | RequestError:
    if returncode in _KILLED_BY_A_FORM:
        return GrammarTooComplexError(f"structured_output.{form.kind}: takes too much time or memory to compile")
    return RequestError(f"structured_output could not be checked: the process for it ended with {returncode}")
