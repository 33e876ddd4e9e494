"""Marks that tests of several packages share: what a system must be able to do."""

import platform
import re
import sys

import pytest


def _linux_version() -> tuple[int, int]:
    """Return (6, 18) and the like; (0, 0) elsewhere."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(numbers[1]), int(numbers[2])) if sys.platform == "linux" and numbers else (0, 0)


needs_populate = pytest.mark.skipif(_linux_version() < (5, 14), reason="memory is brought in ahead by Linux since 5.14")
