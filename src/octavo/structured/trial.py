"""The process in which forms are tried. Run as `python -m octavo.structured.trial`: a form per line in, a verdict out.

It limits itself, so that nobody has to watch it: past `CPU_S` seconds of work on one form, or `MEMORY_BYTES`, the
kernel ends it, and the form has its verdict. It ends by itself when nobody writes to it any more.
"""

import contextlib
import signal
import sys

import msgspec

from octavo.errors import InvalidParameterError
from octavo.structured.check import check_form
from octavo.structured_output import StructuredOutput

CPU_S = 1.5  # the largest forms that are no bombs take a third
MEMORY_BYTES = 2 << 30  # of addresses


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a form, as `InvalidParameterError` has it; an empty field: nothing."""

    field: str = ""
    value: str = ""
    limit: str = ""


def judge(line: bytes) -> Verdict:
    """Try the form in `line`."""
    try:
        check_form(msgspec.json.decode(line, type=StructuredOutput))
    except InvalidParameterError as error:
        return Verdict(field=error.field, value=str(error.value), limit=error.limit)
    return Verdict()


def main() -> None:
    """Serve until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and service managers reach all; the parent decides
        signal.signal(number, signal.SIG_IGN)
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
    """Have the kernel end this process after so much work of all its threads; 0: no more."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
