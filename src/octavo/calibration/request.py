"""The options of `octavo convert --quantize`, validated."""

from pathlib import Path

from octavo.calibration.plan import BitsPlan
from octavo.calibration.quantize import QuantizedCheckpoint, quantize
from octavo.calibration.text import passages_of, read_text
from octavo.convert.source import Checkpoint
from octavo.errors import InvalidParameterError
from octavo.tokenizer.tokenizer import Tokenizer


def quantized(checkpoint: Checkpoint, form: str, bits_for: str, calibration_text: Path | None) -> QuantizedCheckpoint:
    """Quantize a checkpoint, with a progress bar.

    Raises:
        InvalidParameterError: an unknown form, bits or layer; a text that cannot be read; and what `quantize` raises.
    """
    if form != "int4":
        raise InvalidParameterError("quantize", form, "int4; int8 needs no calibration: serve with --quantization int8")
    plan = BitsPlan.parse(bits_for)
    passages = passages_of(read_text(calibration_text), Tokenizer.from_path(checkpoint.path))
    return quantize(checkpoint, plan, passages, shows_progress=True)
