"""The ISA levels of the C++ kernels that a run tries."""

from tests.breadth import pick

from octavo.kernels.dispatch import available_levels, is_built

ALL_LEVELS = available_levels() if is_built() else []
# The one that this machine computes with and the one for any machine; `make test-all` tries those between.
LEVELS = pick([*dict.fromkeys(ALL_LEVELS[:1] + ALL_LEVELS[-1:])], ALL_LEVELS)
