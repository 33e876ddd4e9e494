"""The `octavo` program, whose engine core is the one of `core.py`. Run as `python tests/fakes/program.py serve ...`."""

import sys
from pathlib import Path

from octavo.cli.main import main
from octavo.engine.process_client import ProcessClient

CORE = (sys.executable, str(Path(__file__).with_name("core.py")))

if __name__ == "__main__":
    ProcessClient.command = CORE
    main()
