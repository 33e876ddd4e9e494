"""Validates constraints in a separate process, and remembers valid ones."""

import contextlib
import subprocess
import threading

import msgspec

from octavo.child_python import child_command, child_environment
from octavo.contracts.frames import plain
from octavo.errors import GrammarTooComplexError, InvalidParameterError, RequestError
from octavo.structured.trial import Verdict
from octavo.structured_output import StructuredOutput

MAX_REMEMBERED = 256
_CLOSE_S = 5.0
# Exit codes of a process whose constraint exceeded a limit: CPU time, memory, stack. Negative: killed by a signal.
_KILLED_BY_A_CONSTRAINT = frozenset({-27, -6, -9, -11})  # SIGPROF, SIGABRT, SIGKILL, SIGSEGV


class StructuredOutputChecker:
    """Thread-safe. The process is started for the first constraint, in 0.2 s, and again whenever one has killed it."""

    def __init__(self) -> None:
        self._good: dict[StructuredOutput, None] = {}  # oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, constraint: StructuredOutput) -> None:
        """Raise if no output can satisfy `constraint`. May take seconds for a malicious one.

        Raises:
            InvalidParameterError: names the location of the error.
            GrammarTooComplexError: validation takes too much time or memory.
        """
        with self._lock:
            if constraint not in self._good:
                self._try(constraint)
            self._good.pop(constraint, None)
            self._good[constraint] = None
            if len(self._good) > MAX_REMEMBERED:
                del self._good[next(iter(self._good))]

    def close(self) -> None:
        """Stop the process; it is restarted when needed."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _try(self, constraint: StructuredOutput) -> None:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(constraint, enc_hook=plain) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise _death(constraint, self._end(process))
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.field:
            raise InvalidParameterError(verdict.field, verdict.value, verdict.limit)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:  # it was killed from outside
            self._end(self._process)
        if self._process is None:
            self._process = _start()
        return self._process

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the process to exit; return its exit code."""
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died before reading everything
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _start() -> "subprocess.Popen[bytes]":
    command = child_command("octavo.structured.trial")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())


def _death(constraint: StructuredOutput, returncode: int) -> GrammarTooComplexError | RequestError:
    if returncode in _KILLED_BY_A_CONSTRAINT:
        return GrammarTooComplexError(f"structured_output.{constraint.kind}: compilation takes too much time or memory")
    return RequestError(f"structured_output could not be checked: the checker process exited with {returncode}")
