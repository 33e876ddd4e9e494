"""Starts Octavo's own child processes such that the working folder is no place that they import from.

`python -m` would put it first on `sys.path`; see `working_folder`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from octavo.working_folder import OCTAVO_HOME, means_working_folder


def child_command(module: str, *, also_imports: str = "octavo") -> list[str]:
    """Return the command that runs `main` of `module`; arguments may follow. Start it with `child_environment`.

    A child finds what is installed. Of this process's other folders it gets those that hold Octavo and `also_imports`,
    a module, last on its path. The option -P, unlike its environment variable, is not inherited by its children.
    Before its imports, which take long, it begins to ignore SIGINT and SIGTERM: terminals and service managers signal
    all processes, and the parent decides.
    """
    homes = [OCTAVO_HOME, _home(also_imports)]
    ignore = "import signal as s; [s.signal(number, s.SIG_IGN) for number in (s.SIGINT, s.SIGTERM)]"
    path = f"import sys; sys.path += [home for home in {homes!r} if home not in sys.path]; del sys.argv[0]"
    code = f"{ignore}; {path}; from importlib import import_module; sys.exit(import_module(sys.argv[0]).main())"
    return [sys.executable, "-P", "-c", code, module]


def child_environment() -> dict[str, str]:
    """Return this process's environment without entries of PYTHONPATH such as "" and ".", the working folder."""
    kept = dict(os.environ)
    entries = kept.pop("PYTHONPATH", "").split(os.pathsep)
    if named := [entry for entry in entries if not means_working_folder(entry)]:
        kept["PYTHONPATH"] = os.pathsep.join(named)
    return kept


def _home(module: str) -> str:
    """Return the folder that a module's top-level package is imported from; Octavo's if it has none."""
    name = module.partition(".")[0]
    spec = find_spec(name) if name != "octavo" else None
    if spec is None:  # unknown ones fail in the child, which says so
        return OCTAVO_HOME
    places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
    return str(Path(places[0]).absolute().parent) if places else OCTAVO_HOME
