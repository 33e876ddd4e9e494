"""Reads the default sampling parameters of a GGUF file, `general.sampling.*`; names as in generation_config.json.

Keys and meanings are those of llama.cpp (`gguf-py/gguf/constants.py`, `common/sampling.cpp`).
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_PREFIX = "general.sampling."
# By key: its name here, and the bounds of values that have an effect.
_KNOWN = {
    "temp": ("temperature", -math.inf, math.inf),
    "top_k": ("top_k", -math.inf, 2**31),
    "top_p": ("top_p", 1e-9, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 1e-9, math.inf),
}
# Samplers that Octavo does not have, and the values that turn them off. The others only tune these.
_OTHERS = {"xtc_probability": 0.0, "mirostat": 0}


def sampling_settings(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are present; log those that have no effect here."""
    settings: dict[str, Any] = {}
    for key, (name, lowest, highest) in _KNOWN.items():
        value = metadata.get(_PREFIX + key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest or math.isinf(value):
            logger.warning("%s: %s%s=%r has no effect: it is out of range", path, _PREFIX, key, value)
        elif key == "top_k":
            settings[name] = max(int(value), -1)  # 0 and less: all tokens
        else:  # stored as float32: 0.95 is meant; a temperature below 0 is greedy
            settings[name] = max(float(str(np.float32(value))), 0.0)
    for key, neutral in _OTHERS.items():
        if metadata.get(_PREFIX + key, neutral) != neutral:
            logger.warning("%s: %s%s=%r has no effect: unsupported", path, _PREFIX, key, metadata[_PREFIX + key])
    return settings
