"""The `octavo` program: dispatches to commands and maps errors to exit codes. And `octavo env`, for bug reports.

Exit codes: 0 success, 1 engine error, 2 user error, 130 interrupted. Command modules are imported on demand, and torch
only when a command runs, so that `octavo --help` is instant.
"""

import logging
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo._version import __version__
from octavo.cli.options import TYPER_SETTINGS
from octavo.cli.terminal import prepare_streams, print_facts
from octavo.errors import UserError

# By command: the module with a function, or a group of commands, of that name.
COMMANDS = MappingProxyType(
    {
        **{name: name for name in ("serve", "generate", "embed", "chat", "batch", "replay", "bench", "top")},
        **dict.fromkeys(("inspect", "convert", "lora"), "checkpoints"),
        "env": "main",
    }
)
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "msgspec", "pyzmq", "huggingface_hub")
EXIT_ENGINE_ERROR = 1
EXIT_USER_ERROR = 2


class LazyCommands(TyperGroup):
    """Imports command modules on demand and reports their errors."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"octavo.cli.{COMMANDS[cmd_name]}"), cmd_name)
        if not isinstance(command, typer.Typer):
            group = typer.Typer(**TYPER_SETTINGS)
            group.command()(command)
            command = group
        return typer.main.get_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:  # load all commands, as typer suggests the closest one
            self.commands.update({name: self.get_command(ctx, name) for name in COMMANDS})
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):  # handled by typer
            raise
        except Exception as error:
            if hasattr(error, "format_message") and hasattr(error, "exit_code"):
                raise  # a usage error for typer to show, whose class differs between typer versions
            if ctx.params["debug"]:
                traceback.print_exc()
            _report(error)
            raise typer.Exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ENGINE_ERROR) from error


app = typer.Typer(cls=LazyCommands, **{**TYPER_SETTINGS, "no_args_is_help": True, "add_completion": True})


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's log.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Octavo: LLM inference. Same request, same bytes."""
    logging.basicConfig(level=logging.INFO if verbose or debug else logging.WARNING, format="%(levelname)s %(message)s")


def env(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps or xpu", metavar="<str>")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="and test the machine for two seconds: exactness, memory, limits, disk")
    ] = False,
) -> None:
    """Versions, the device and its memory, and the kernels for each dtype: what to paste into a bug report."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from octavo.device.manager import DeviceManager

    own = {"octavo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    others = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            others[name] = version(name)
    manager = DeviceManager(device)
    facts = own | others | manager.describe()
    if check:
        from octavo.cli.installed import extras
        from octavo.device.self_check import self_check
        from octavo.loader.packed_cache import cache_folder

        facts |= {"extras": extras()} | self_check(manager, cache_folder().parent)
    print_facts(facts, as_json=json)


def _report(error: Exception) -> None:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # a full disk, say
        file = f"{error.filename}: " if error.filename is not None else ""
        text = f"{file}{error.strerror} (`octavo --debug ...` shows the traceback)"
    elif type(error).__module__ != "octavo.errors":
        text = f"{type(error).__name__}: {text} (a bug in Octavo; `octavo --debug ...` shows the traceback)"
    print(f"octavo: {text}", file=sys.stderr)


def main() -> None:
    prepare_streams()
    app(prog_name="octavo")


if __name__ == "__main__":
    main()
