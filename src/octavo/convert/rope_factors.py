"""The rotary settings of `config.json` for a GGUF file that has the divisors of the frequencies instead.

Of Llama 3.1 and later, the file has only the factors that its converter derived from the settings.
"""

import math
from typing import Any

import numpy as np

from octavo.errors import UnsupportedModelError

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # the same in all published models


def with_llama3_settings(settings: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the settings with those of Llama 3.1 in place of the divisors that follow from them.

    Raises UnsupportedModelError: other divisors, which `config.json` has no key for.
    """
    rope = settings["rope_parameters"]
    if "divisors" not in rope:
        return settings
    found = np.array(rope["divisors"])
    frequencies = rope["rope_theta"] ** (-np.arange(len(found)) / len(found))
    factor = float(found.max())
    if not np.allclose(found, [_divisor(each, factor) for each in frequencies], rtol=1e-4):
        why = "config.json has no settings for its rope_freqs.weight, which are not Llama 3.1's"
        raise UnsupportedModelError(f"{origin}: cannot be converted: {why}")
    llama3 = {
        "rope_theta": rope["rope_theta"],
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }
    return {**settings, "rope_parameters": llama3}


def _divisor(frequency: float, factor: float) -> float:
    """Return the divisor of a frequency in Llama 3.1 (transformers' `llama3` rotary scaling)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < _ORIGINAL / _HIGH:
        return 1.0
    if wavelength > _ORIGINAL / _LOW:
        return factor
    smooth = (_ORIGINAL / wavelength - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)
