"""Programs with a fake model, for tests of processes, signals and clients: to start them imports no torch.

Full breadth has the demo model in its place.
"""

import sys
from pathlib import Path

from tests.breadth import pick

FAKE_CORE = (sys.executable, str(Path(__file__).with_name("core.py")))  # also where its `POISON` is needed
CORE = pick(FAKE_CORE, (sys.executable, "-m", "octavo.engine.core_proc"))
OCTAVO = pick(
    (sys.executable, str(Path(__file__).with_name("program.py"))),
    (sys.executable, "-m", "octavo.cli.main"),
)
