"""The `octavo` program, whose engine core is the one of `core.py`. Run as `python tests/fakes/program.py serve ...`.

With `--no-engine-process` the core is in the program's process.
"""

import runpy
import sys
from pathlib import Path

from octavo.cli.main import main
from octavo.engine import inproc_client
from octavo.engine.process_client import ProcessClient

CORE = (sys.executable, str(Path(__file__).with_name("core.py")))

if __name__ == "__main__":
    ProcessClient.command = CORE
    if "--no-engine-process" in sys.argv:
        make_executor = runpy.run_path(CORE[-1])["make_executor"]
        inproc_client.make_executor = make_executor  # type: ignore[attr-defined]  # a name that it imports
    main()
