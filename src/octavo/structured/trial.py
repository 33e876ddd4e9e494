"""The process that validates constraints: it reads one per line and writes verdicts.

It limits itself and needs no supervision: beyond `CPU_S` seconds of CPU time for one constraint, or `MEMORY_BYTES`, the
kernel kills it, which is a verdict as well. It exits at the end of its input.
"""

import contextlib
import signal
import sys

import msgspec

from octavo.errors import InvalidParameterError
from octavo.structured.check import check_structured_output
from octavo.structured_output import StructuredOutput

CPU_S = 1.5  # the largest harmless constraints take a third
MEMORY_BYTES = 2 << 30  # of address space


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a constraint, as in `InvalidParameterError`; an empty field means nothing."""

    field: str = ""
    value: str = ""
    limit: str = ""


def judge(line: bytes) -> Verdict:
    """Validate the constraint in `line`."""
    try:
        check_structured_output(msgspec.json.decode(line, type=StructuredOutput))
    except InvalidParameterError as error:
        return Verdict(field=error.field, value=str(error.value), limit=error.limit)
    return Verdict()


def main() -> None:
    """Serve until the end of input."""
    _limit_memory()
    while line := sys.stdin.buffer.readline():
        _limit_work(CPU_S)
        verdict = judge(line)
        _limit_work(0.0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_work(seconds: float) -> None:
    """Set the CPU time after which the kernel kills this process, over all threads; 0: no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
