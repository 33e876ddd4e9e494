"""The page of commands and flags, made of the program's own parser."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from octavo.cli.main import app

_INTRODUCTION = """# Commands and flags

Made of the program's own definitions: what `octavo COMMAND --help` says. Every option of the engine is also a keyword
argument of `LLM` and `AsyncLLM`, with underscores; every option of `octavo serve` is also an environment variable
(`OCTAVO_MAX_NUM_SEQS=64`) and a key of its YAML file ([settings](../operations.md#settings)).
"""


def commands_page() -> str:
    """Return the page's Markdown: a section for each command, with a table of its arguments and flags."""
    return _INTRODUCTION + "".join(_section(words, command) for words, command in walk(get_command(app), ("octavo",)))


def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command and all below it, each with the words that call it."""
    yield words, command
    if hasattr(command, "list_commands"):  # a group, whose class differs between versions of typer
        for name in command.list_commands(None):
            yield from walk(command.get_command(None, name), (*words, name))


def _section(words: tuple[str, ...], command: Any) -> str:
    lines = [f"\n## {' '.join(words)}\n", f"\n{(command.help or '').strip()}\n"]
    context = command.make_context(" ".join(words), [], resilient_parsing=True)
    records = [parameter.get_help_record(context) for parameter in command.params]  # None: hidden
    rows = [f"| `{flag}` | {_cell(text)} |\n" for flag, text in filter(None, records)]
    if rows:
        lines += ["\n| flag | what it does |\n| --- | --- |\n", *rows]
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
