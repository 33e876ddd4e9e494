"""The program as such: help, version, exit codes, and what it must not import."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from octavo import __version__
from octavo.cli import main
from octavo.errors import EngineDeadError, InvalidParameterError


def octavo(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_help_names_every_command() -> None:
    code, text, _ = octavo("--help")
    assert code == 0
    for name in main.COMMANDS:
        assert f"  {name} " in text
        assert octavo(name, "--help")[0] == 0


def test_version() -> None:
    assert octavo("--version") == (0, f"octavo {__version__}\n", "")


def test_help_imports_neither_torch_nor_what_an_engine_needs() -> None:
    program = (
        "import sys; from octavo.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print([name for name in ('torch', 'tokenizers', 'numpy', 'jinja2', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "\x1b" not in done.stdout


def test_shells_complete_commands_and_flags() -> None:
    for typed, number, wanted in (("octavo ser", 1, "serve"), ("octavo serve --max-num-s", 2, "--max-num-seqs")):
        asked = {"_OCTAVO_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(number)}
        program = "from octavo.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **asked}
        )
        assert wanted in done.stdout.split()


@pytest.mark.parametrize(("typed", "meant"), [("genrate", "generate"), ("chatt", "chat")])
def test_a_misspelt_command_names_the_nearest(typed: str, meant: str) -> None:
    code, _, complaint = octavo(typed)
    assert code == 2
    assert f"'{meant}'" in complaint


def test_a_misspelt_flag_names_the_nearest() -> None:
    code, _, complaint = octavo("generate", "--promt", "x")
    assert code == 2
    assert "--prompt" in complaint


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (InvalidParameterError("top_p", 3, "at most 1"), 2, "octavo: top_p=3: at most 1\n"),
        (EngineDeadError("killed by signal 9"), 1, "octavo: killed by signal 9\n"),
        (
            ZeroDivisionError("oh"),
            1,
            "octavo: ZeroDivisionError: oh (a bug in Octavo; `octavo --debug ...` shows the traceback)\n",
        ),
        (OSError(28, "No space left"), 1, "octavo: No space left (`octavo --debug ...` shows the traceback)\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, code: int, line: str
) -> None:
    monkeypatch.setattr(main.LazyCommands, "get_command", _command_that(raised))
    assert octavo("env") == (code, "", line)
    code_with_debug, _, text = octavo("--debug", "env")
    assert code_with_debug == code
    assert "Traceback" in text


def test_streams_that_the_caller_has_closed() -> None:
    child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    program = (
        "import subprocess, sys; from octavo.cli.terminal import prepare_streams; prepare_streams()\n"
        "assert not sys.stdin.isatty() and sys.stdin.read() == ''\n"
        "print('nobody reads this', file=sys.stderr); print('nor this', flush=True)\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closing, sys.executable, "-c", program], check=False).returncode == 0


def _command_that(raises: Exception) -> Callable[..., object]:
    app = typer.Typer()

    @app.command()
    def failing() -> None:
        raise raises

    command = typer.main.get_command(app)
    return lambda self, ctx, name: command if name in main.COMMANDS else None
