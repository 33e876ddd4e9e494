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
    rows = [row for parameter in command.params if (row := _row(parameter)) is not None]
    if rows:
        lines += ["\n| flag | value | what it does |\n| --- | --- | --- |\n", *rows]
    return "".join(lines)


def _row(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    spelled = ", ".join(f"`{name}`" for name in names)
    choices = getattr(parameter.type, "choices", None)
    is_switch = getattr(parameter, "is_flag", False)
    kind = "" if is_switch else " ".join(map(str, choices)) if choices else parameter.metavar or parameter.type.name
    text = parameter.help or ""
    shown = parameter.default
    if not is_argument and shown not in (None, False, True, (), []) and "[default" not in text and not callable(shown):
        text += f" [default: {shown}]"
    return f"| {spelled} | {_cell(kind.lower())} | {_cell(text)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
