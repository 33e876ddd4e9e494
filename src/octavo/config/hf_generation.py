"""Reads EOS tokens and default sampling parameters from a checkpoint."""

import logging
from pathlib import Path
from typing import Any

from octavo.config.json_fields import JsonFields
from octavo.config.model import GenerationDefaults
from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Key of the file -> parameter; the first ones are not in use with `do_sample: false`.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_NAMES = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
_INTEGERS = ("top_k", "max_tokens")

GGUF_SAMPLING = "gguf_sampling"  # `config/gguf_sampling.py`: of a GGUF file


def read_eos_token_ids(path: Path, config: JsonFields) -> tuple[int, ...]:
    """Return the EOS token ids from `generation_config.json`, else from `config.json`; possibly none."""
    return _generation_config(path).token_ids("eos_token_id") or config.token_ids("eos_token_id")


def read_generation_defaults(path: Path, config: JsonFields) -> GenerationDefaults:
    """Read the default sampling parameters from `generation_config.json` or the GGUF file; all None without any.

    `do_sample: false` means that the file's sampling values are not in use, so they are ignored. A value that no
    request may have does not keep the model from loading: a warning says that it is ignored.

    Raises:
        CheckpointError: the file is malformed.
    """
    fields = config.nested(GGUF_SAMPLING) if GGUF_SAMPLING in config else _generation_config(path)
    names = dict(zip(_SAMPLING, _SAMPLING, strict=True)) if _is_sampled(fields) else {}
    values = {name: _usable(fields, key, name) for key, name in (names | _NAMES).items() if key in fields}
    return GenerationDefaults(**{name: value for name, value in values.items() if value is not None})


def _is_sampled(fields: JsonFields) -> bool:
    value = fields.values.get("do_sample", True)
    if not isinstance(value, bool):
        logger.warning("%s: do_sample=%r is ignored: true or false is expected", fields.origin, value)
    return value is not False


def _usable(fields: JsonFields, key: str, name: str) -> Any:
    """Return a value if a request may have it, else None."""
    value = fields.values[key]
    is_integer = name in _INTEGERS
    if isinstance(value, float) and is_integer and value.is_integer():
        value = int(value)
    try:
        SamplingParams.from_options({name: value})
    except InvalidParameterError as error:
        logger.warning("%s: %s=%r is ignored: %s", fields.origin, key, fields.values[key], error)
        return None
    return value if is_integer else float(value)


def _generation_config(path: Path) -> JsonFields:
    file = path / "generation_config.json"
    return JsonFields.read(file) if file.exists() else JsonFields(str(file), {})
