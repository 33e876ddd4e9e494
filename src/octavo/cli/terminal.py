"""What commands read and print: standard streams in any locale, tables and reports for people, JSON for programs.

Input is UTF-8, as files are; output never fails for the characters of a model.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper

from octavo.errors import InvalidParameterError

Report = dict[str, float]
PERCENTILES = (50.0, 90.0, 99.0)  # unless others are asked for

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by file descriptor


def prepare_streams() -> None:
    """Set the streams of this process. What the encoding of the output lacks is written as backslash escapes.

    Those that the caller has closed are the null device, also in child processes: a socket that got one of their file
    descriptors would receive what libraries print.
    """
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            nothing = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open while the process lives
            if nothing.fileno() < len(_STREAMS):
                os.set_inheritable(nothing.fileno(), True)
            setattr(sys, name, nothing)
    if isinstance(sys.stdin, TextIOWrapper) and not sys.stdin.isatty():  # a terminal knows what it sends
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # for `decoded` to name the byte
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def decoded(text: str, name: str, *, first_line: int = 1) -> str:
    """Return text of an argument or of standard input, whose undecodable bytes Python kept as lone surrogates. A byte
    order mark before it is no part of it.

    Raises InvalidParameterError: `name`, line and byte of what is not UTF-8.
    """
    data = text.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8").removeprefix("\ufeff" if first_line == 1 else "")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        byte = error.start - data.rfind(b"\n", 0, error.start)
        value = f"byte {data[error.start]:#04x}"
        raise InvalidParameterError(name, value, f"must be UTF-8; it is not at byte {byte} of line {line}") from error


def print_json_line(line: str) -> None:
    """Print one line of JSON, with escapes where the output is not UTF-8."""
    if (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8":
        line = "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in line)
    print(line)


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the `rank`-th percentile of `values`, linearly interpolated."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * rank / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(name: str, values: Sequence[float], ranks: Sequence[float] = PERCENTILES) -> Report:
    """Return mean and percentiles of `values` under keys that start with `name`; empty if there are no values."""
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}_mean": mean} | {f"{name}_p{rank:g}": percentile(values, rank) for rank in ranks}


def print_reports(reports: Sequence[Report], *, as_json: bool) -> None:
    """Print one line of JSON per report, or a table with one column per report."""
    if as_json:
        for report in reports:
            print(json.dumps(report))
        return
    names = dict.fromkeys(name for report in reports for name in report)
    print_table({name: [_figure(report.get(name)) for report in reports] for name in names})


def print_facts(facts: Mapping[str, str], *, as_json: bool) -> None:
    """Print facts by name, as one line of JSON or a table."""
    if as_json:
        print(json.dumps(facts))
    else:
        print_table({name: [value] for name, value in facts.items()})


def print_table(rows: Mapping[str, Sequence[str]]) -> None:
    """Print names on the left and values on the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    for _ in range(max(map(len, rows.values()), default=0)):
        table.add_column(justify="left", overflow="fold")
    for name, values in rows.items():
        table.add_row(name, *values)
    Console(highlight=False).print(table)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
