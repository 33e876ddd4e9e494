"""The commands on the documents' pages are those that there are: `octavo ...` is read by the program's own parser.

Nothing runs here; `tests/test_readme.py` runs the README.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from octavo.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAST = "log.md"  # says what was tried, with commands of the time
SEPARATORS = {"|", "||", "&", "&&", ";", "(", ")"}
FENCE = re.compile(r"^( *)(`{3,})[ \t]*(\w*)\n(.*?)^ *\2[ \t]*$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^(?: {4,}\S.*)\n?)+", re.MULTILINE)
SHELLS = {"", "sh", "bash", "shell", "console"}


def lines_of_code(text: str) -> Iterator[str]:
    """Yield the lines of a page's blocks that a shell could read; those that end in a backslash go with the next."""
    blocks = [body for _, _, language, body in FENCE.findall(text) if language in SHELLS]
    blocks += INDENTED.findall(FENCE.sub("", text))
    for block in blocks:
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def programs(line: str) -> list[list[str]]:
    """Return the programs that a line of shell calls, each with its arguments; none if it is no shell."""
    lexer = shlex.shlex(line.strip(), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # a quote of prose
        return []
    found: list[list[str]] = [[]]
    skips = False
    for word in words:
        if word in SEPARATORS:
            found.append([])
        elif set(word) <= set("<>&") or skips:  # a redirection, and its file
            skips = set(word) <= set("<>&")
        else:
            found[-1].append(word)
    return [bare for program in found if (bare := without_prefix(program))]


def without_prefix(words: list[str]) -> list[str]:
    """Drop what comes before a program: assignments, sudo, a prompt; and its folder."""
    while words and (words[0] in ("$", "sudo", "exec", "time", "nohup") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    return [words[0].rpartition("/")[2], *words[1:]] if words else []


@cache
def command_of(*names: str) -> Any:
    """Return the parser of a command, or of a group of them; None: there is none. Building one takes a while."""
    return command_of(*names[:-1]).get_command(None, names[-1]) if names else get_command(app)


def parse(words: list[str]) -> None:
    """Read a command line as the program does, without running it. Raises what the parser raises."""
    command = command_of()
    names: list[str] = []
    while hasattr(command, "get_command"):  # a group, whose class differs between versions of typer
        own = list(takewhile(lambda word: word.startswith("-"), words))
        known = {spelling for parameter in command.params for spelling in parameter.opts}
        assert {*own} <= known | {"--help", "-h"}, f"octavo {' '.join(names)} has no {own}"
        words = words[len(own) :]
        if not words:
            return
        names.append(words[0])
        command = command_of(*names)
        assert command is not None, f"no such command: octavo {' '.join(names)}"
        words = words[1:]
    if {"--help", "-h"} & {*words}:
        return
    command.make_context(names[-1], list(words))


def is_known_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def check(words: list[str]) -> str | None:
    """Return what kind of command this is; None: not one of ours. Fails if it cannot be right."""
    match words:
        case ["octavo", *rest]:
            parse(rest)
            return "octavo"
        case ["make", target, *_] if re.fullmatch(r"[a-z-]+", target):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
            return "make"
        case [python, "-m", module, *_] if python.startswith("python") and module.startswith(
            ("tests.", "tools.", "benchmarks.")
        ):
            assert is_known_module(module), f"no module {module}"
            return "python"
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for package in packages:
                if found := re.fullmatch(r"octavo\[(\w+)\]", package):
                    assert found[1] in extras, f"no extra {found[1]}"
            return "pip"
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != PAST], ids=lambda page: page.name)
def test_commands_can_be_typed(page: Path) -> None:
    for line in lines_of_code(page.read_text(encoding="utf-8")):
        for words in programs(line):
            try:
                check(words)
            except Exception as error:
                error.add_note(f"{page.name}: {line.strip()}")
                raise


def test_commands_in_the_text_exist() -> None:
    """What is in backticks within a sentence may be a part of a command: its words and flags exist."""
    for page in PAGES:
        if page.name == PAST:
            continue
        for text in re.findall(r"`(octavo [a-z][^`\n]*)`", FENCE.sub("", page.read_text(encoding="utf-8"))):
            words, names = text.split()[1:], tuple[str, ...]()
            while words and hasattr(command_of(*names), "get_command"):
                names, words = (*names, words[0]), words[1:]
                assert command_of(*names) is not None, f"{page.name}: {text}"
            flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            known = {name for each in command_of(*names).params for name in (*each.opts, *each.secondary_opts)}
            assert flags <= known | {"--help"}, f"{page.name}: {text}"


def test_most_pages_have_commands() -> None:
    kinds = [check(words) for page in PAGES if page.name != PAST
             for line in lines_of_code(page.read_text(encoding="utf-8")) for words in programs(line)]  # fmt: skip
    assert kinds.count("octavo") > 50
    assert {"make", "python", "pip"} <= {*kinds}


@pytest.mark.parametrize(
    "line", ["octavo serv demo", "octavo serve demo --prot 8000", "octavo serve demo --port x", "make no-such",
             "python -m benchmarks.none", "pip install 'octavo[none]'", "echo x | octavo chat --modell demo"],
)  # fmt: skip
def test_a_wrong_command_is_found(line: str) -> None:
    *_, words = programs(line)
    with pytest.raises(Exception, match=r"no such|No such|no target|no module|no extra|valid integer"):
        check(words)
