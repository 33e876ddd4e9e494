"""How a CPU's threads wait for one another between ops. To be settled before torch is imported, so nothing here does.

Every parallel op ends when its last thread does. By default those that are done spin meanwhile, on the very core that
a neighbouring process might have used instead of the last thread's. Measured on two cores with one busy neighbour, four
layers of Qwen3-0.6B in bfloat16: 130 ms a step at batch 1 and 425 ms at batch 32 when spinning; 12 and 75 ms when
sleeping at once; 12 and 85 ms when sleeping after 1,000 turns, which on a quiet machine spare most of the waking.
"""

import os
import sys

_WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",  # any OpenMP: sleep
    "GOMP_SPINCOUNT": "1000",  # GNU's, which torch's Linux wheels bring: after so many turns, some 20 us
}


def wait_without_spinning() -> bool:
    """Ask OpenMP to let waiting threads sleep. What the user's environment says about it stands.

    Changes `os.environ`, for this process and its children. Returns whether it was in time: OpenMP reads it once, when
    torch is imported.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(_WAITING)
    return "torch" not in sys.modules
