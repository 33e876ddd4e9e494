"""How CPU threads wait between ops. Must be set before torch is imported, so this module does not import it.

A parallel op ends when its last thread does. Threads that are done keep spinning, by default for about 15 ms, and
occupy cores that other processes could use; those then compete with the last thread instead. So after 1 ms they should
sleep. Measured on two cores, four layers of Qwen3-0.6B in bfloat16, ms per step at batch 1 and 32:

    spins before sleeping     300,000 (default)   20,000      0
    quiet machine             7.4 and 23          - and 23    9.0 and 40
    one busy neighbor         130 and 425         25 and -    12 and 75
"""

import os
import sys

_WAITING = {
    "GOMP_SPINCOUNT": "20000",  # spins of about 50 ns; GNU OpenMP, used by torch's Linux wheels
    "KMP_BLOCKTIME": "1",  # ms; LLVM's and Intel's OpenMP
}
# If any of these is set, the user has decided.
_SETTINGS = ("OMP_WAIT_POLICY", *_WAITING)


def limit_spinning() -> bool:
    """Make waiting OpenMP threads sleep soon, unless the user's environment configures it.

    Changes `os.environ` for this process and its children. Returns whether it was in time: OpenMP reads the variables
    once, when torch is imported.
    """
    if not any(name in os.environ for name in _SETTINGS):
        os.environ.update(_WAITING)
    return "torch" not in sys.modules
