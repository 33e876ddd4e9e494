"""Keeps the working folder off the path that the `octavo` program and Octavo's child processes import from.

It may be a checkpoint's, or any of the user's, and a file `random.py` or `zmq.py` in it would be run in place of the
module that Octavo asks for. Imports at the top nothing that Python has not imported at its start: it could be such a
file already.
"""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def leave_working_folder() -> None:
    """If this process is the `octavo` program, take the working folder off `sys.path`, unless somebody put it there.

    By its name in PYTHONPATH, that is, or because Octavo itself is in it. Programs that import Octavo decide alone.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_wanted = any(os.path.isabs(entry) and _is_working_folder(entry) for entry in (*entries, _HOME))
    if _is_program() and not is_wanted:
        sys.path[:] = [entry for entry in sys.path if not _is_working_folder(entry)]


def child_command(module: str, *, also_imports: str = "octavo") -> list[str]:
    """Return the command that runs `main` of `module`; arguments may follow. Start it with `child_environment`.

    A child finds what is installed; `python -m` would put the working folder first. Of this process's other folders it
    gets those that hold Octavo and `also_imports`, a module, last on its path. The option -P, unlike its environment
    variable, is not inherited by its children. Before its imports, which take long, it begins to ignore SIGINT and
    SIGTERM: terminals and service managers signal all processes, and the parent decides.
    """
    homes = [_HOME, _home_of(also_imports)]
    ignore = "import signal as s; [s.signal(number, s.SIG_IGN) for number in (s.SIGINT, s.SIGTERM)]"
    path = f"import sys; sys.path += [home for home in {homes!r} if home not in sys.path]; del sys.argv[0]"
    code = f"{ignore}; {path}; from importlib import import_module; sys.exit(import_module(sys.argv[0]).main())"
    return [sys.executable, "-P", "-c", code, module]


def child_environment() -> dict[str, str]:
    """Return this process's environment without entries of PYTHONPATH such as "" and ".", the working folder."""
    kept = dict(os.environ)
    entries = kept.pop("PYTHONPATH", "").split(os.pathsep)
    if named := [entry for entry in entries if os.path.isabs(entry) or not _is_working_folder(entry)]:
        kept["PYTHONPATH"] = os.pathsep.join(named)
    return kept


def _home_of(module: str) -> str:
    """Return the folder that a module's top-level package is imported from; Octavo's if it has none."""
    from importlib.util import find_spec

    name = module.partition(".")[0]
    spec = find_spec(name) if name != "octavo" else None
    if spec is None:  # unknown ones fail in the child, which says so
        return _HOME
    places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
    return os.path.dirname(os.path.abspath(places[0])) if places else _HOME


def _is_program() -> bool:
    called = sys.argv[0] if sys.argv else ""
    if called == "-m":  # so while Python looks for the module
        return any(argument.removeprefix("-m") == f"{__package__}.cli.main" for argument in sys.orig_argv)
    return os.path.splitext(os.path.basename(called))[0] == "octavo"


def _is_working_folder(entry: str) -> bool:
    return os.path.realpath(entry) == os.path.realpath(os.curdir)
