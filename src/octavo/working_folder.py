"""Tells which entries of `sys.path` mean the working folder, and takes them off the `octavo` program's.

The working folder may be a checkpoint's, or any of the user's, and a file `random.py` or `zmq.py` in it would be run in
place of the module that Octavo asks for. Imports nothing that Python has not imported at its start: it could be such a
file already.
"""

import os
import sys

OCTAVO_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def means_working_folder(entry: str) -> bool:
    """Whether an entry of PYTHONPATH means the working folder without its name, as an empty one and "." do."""
    return not os.path.isabs(entry) and _is_working_folder(entry)


def leave_working_folder() -> None:
    """If this process is the `octavo` program, take the working folder off `sys.path`, unless somebody put it there.

    By its name in PYTHONPATH, that is, or because Octavo itself is in it. Programs that import Octavo decide alone.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_wanted = any(os.path.isabs(entry) and _is_working_folder(entry) for entry in (*entries, OCTAVO_HOME))
    if _is_program() and not is_wanted:
        sys.path[:] = [entry for entry in sys.path if not _is_working_folder(entry)]


def _is_program() -> bool:
    called = sys.argv[0] if sys.argv else ""
    if called == "-m":  # so while Python looks for the module
        return any(argument.removeprefix("-m") == "octavo.cli.main" for argument in sys.orig_argv)
    return os.path.splitext(os.path.basename(called))[0] == "octavo"


def _is_working_folder(entry: str) -> bool:
    return os.path.realpath(entry) == os.path.realpath(os.curdir)
