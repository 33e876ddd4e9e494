"""An engine core in a process of its own that is given a drafter.

It knows sequences from a file of JSON, which an environment variable names.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from octavo.engine import core_proc
from octavo.engine.core import EngineCore
from octavo.testing import KnownDrafter

VARIABLE = "OCTAVO_TEST_KNOWN_SEQUENCES"


def drafter() -> KnownDrafter:
    known = json.loads(Path(os.environ[VARIABLE]).read_text())
    return KnownDrafter.of_sequences(known, vocab_size=max(map(max, known)) + 1)


if __name__ == "__main__":
    core_proc.__dict__["EngineCore"] = partial(EngineCore, drafter=drafter())
    sys.exit(core_proc.main())
