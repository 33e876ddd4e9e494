"""Validates constraints before any work is done, in a process of its own; errors name the location.

Needs no tokenizer. Most constraints take a millisecond, but a malicious one may take any time or crash the library, so
`StructuredOutputChecker` has them validated in a process that may die: this module as a program, which reads one
constraint per line and writes verdicts. It limits itself: beyond `CPU_S` seconds of CPU time for one constraint, or
`MEMORY_BYTES`, the kernel kills it, which is a verdict as well. Errors that only compilation for the model's tokenizer
finds end the request later, with a typed error.
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec

from octavo.contracts.frames import plain
from octavo.errors import GrammarTooComplexError, InvalidParameterError, RequestError
from octavo.structured.grammar_text import grammar_text, lark_of, schema_grammar
from octavo.structured.schema import advice, find_excess, locate_fault
from octavo.structured_output import StructuredOutput
from octavo.working_folder import child_command, child_environment

MAX_REMEMBERED = 256
MAX_REPEATS = 65_536  # in a regular expression
CPU_S = 1.5  # the largest harmless constraints take a third
MEMORY_BYTES = 2 << 30  # of address space
_CLOSE_S = 5.0
_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*\{(\d+)(?:,(\d*))?\}")
# Exit codes of a process whose constraint exceeded a limit: CPU time, memory, stack. Negative: killed by a signal.
_KILLED_BY_A_CONSTRAINT = frozenset({-27, -6, -9, -11})  # SIGPROF, SIGABRT, SIGKILL, SIGSEGV

Verdict = tuple[str, str, str] | None  # what is wrong with a constraint: field, value and limit of the error


class StructuredOutputChecker:
    """Thread-safe. The process is started for the first constraint, in 0.2 s, and again whenever one has killed it."""

    def __init__(self) -> None:
        self._good: dict[StructuredOutput, None] = {}  # oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidParameterError if no output can satisfy `constraint`. May take seconds for a malicious one.

        GrammarTooComplexError: that takes too much time or memory.
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
        """Ask again if the process dies and its time was not over: it may have been killed from outside."""
        line, code = self._ask(constraint)
        if not line and code != -signal.SIGPROF:
            line, code = self._ask(constraint)
        if not line and code in _KILLED_BY_A_CONSTRAINT:
            limit = "compilation takes too much time or memory"
            raise GrammarTooComplexError(f"structured_output.{constraint.kind}: {limit}")
        if not line:
            raise RequestError(f"structured_output could not be checked: the checker process exited with {code}")
        verdict: Verdict = msgspec.json.decode(line, type=Verdict)
        if verdict is not None:
            raise InvalidParameterError(*verdict)

    def _ask(self, constraint: StructuredOutput) -> tuple[bytes, int]:
        """Return what the process answers; nothing, and its exit code, if it has died."""
        if self._process is not None and self._process.poll() is not None:  # it was killed from outside
            self._end(self._process)
        if self._process is None:
            command, pipe = child_command(__name__), subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=child_environment())
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(constraint, enc_hook=plain) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        return line, 0 if line else self._end(process)

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


def check_structured_output(constraint: StructuredOutput) -> None:
    """Raise InvalidParameterError, which names the location, if no output can satisfy `constraint`."""
    for field, what, content in _parts(constraint):
        _CHECKS[what](f"structured_output.{field}", content)
    if constraint.kind in ("choice", "tags") and (error := _validate(grammar_text(constraint, {}))) is not None:
        raise InvalidParameterError(f"structured_output.{constraint.kind}", "...", error)


def _parts(constraint: StructuredOutput) -> Iterator[tuple[str, str, str]]:
    """Yield every text that the user has written: its field, its kind, the text."""
    for name in ("json_schema", "regex", "grammar"):
        if (text := getattr(constraint, name)) is not None:
            yield name, name, str(text)
    for index, tag in enumerate(constraint.tags):
        for name in ("json_schema", "grammar"):
            if (text := getattr(tag, name)) is not None:
                yield f"tags[{index}].{name}", name, str(text)


def _check_schema(field: str, text: str) -> None:
    if (excess := find_excess(text)) is not None:
        raise InvalidParameterError(field, "...", f"at {excess[0]}: {excess[1]}")

    def why_not(schema: str) -> str | None:
        return _validate(schema_grammar(schema))

    if (error := why_not(text)) is not None:
        path, fault = locate_fault(text, error, why_not)
        raise InvalidParameterError(field, "...", f"at {path}: {advice(fault)}")


def _check_regex(field: str, pattern: str) -> None:
    for repeat in _REPEAT.finditer(pattern):
        if max(int(count) for count in repeat.groups(default="0") if count) > MAX_REPEATS:
            raise InvalidParameterError(field, "...", f"at {repeat.start()}: more than {MAX_REPEATS} repeats")
    error = _validate(grammar_text(StructuredOutput(regex=pattern), {}))
    if error is not None:
        raise InvalidParameterError(field, _excerpt(pattern), error)


def _check_grammar(field: str, grammar: str) -> None:
    try:
        error = _validate(lark_of(grammar))
    except ValueError as bad_text:
        error = str(bad_text)
    if error is not None:
        raise InvalidParameterError(field, _excerpt(grammar), error)


def _validate(grammar: str) -> str | None:
    from octavo.structured.llguidance_backend import validate

    return validate(grammar)


def _excerpt(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


_CHECKS = {"json_schema": _check_schema, "regex": _check_regex, "grammar": _check_grammar}


def judge(line: bytes) -> Verdict:
    """Validate the constraint in `line`."""
    try:
        check_structured_output(msgspec.json.decode(line, type=StructuredOutput))
    except InvalidParameterError as error:
        return error.field, str(error.value), error.limit
    return None


def main() -> None:
    """Serve until the end of input."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := sys.stdin.buffer.readline():
        _limit_work(CPU_S)
        verdict = judge(line)
        _limit_work(0.0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _limit_work(seconds: float) -> None:
    """Set the CPU time after which the kernel kills this process, over all threads; 0: no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
