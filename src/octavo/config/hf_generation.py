"""Reads EOS tokens and default sampling parameters from a checkpoint."""

from pathlib import Path

from octavo.config.json_fields import JsonFields
from octavo.config.model import GenerationDefaults

GGUF_SAMPLING = "gguf_sampling"  # `config/gguf_sampling.py`: of a GGUF file


def read_eos_token_ids(path: Path, config: JsonFields) -> tuple[int, ...]:
    """Return the EOS token ids from `generation_config.json`, else from `config.json`; possibly none."""
    return _generation_config(path).token_ids("eos_token_id") or config.token_ids("eos_token_id")


def read_generation_defaults(path: Path, config: JsonFields) -> GenerationDefaults:
    """Read the default sampling parameters from `generation_config.json` or the GGUF file; all None without any.

    `do_sample: false` means that the file's sampling values are not in use, so they are ignored.

    Raises:
        CheckpointError: names the file and the key of a malformed value.
    """
    fields = config.nested(GGUF_SAMPLING) if GGUF_SAMPLING in config else _generation_config(path)
    is_sampled = fields.flag("do_sample", True)

    def number(key: str, *, can_be_zero: bool = False) -> float | None:
        return fields.number(key, can_be_zero=can_be_zero) if key in fields else None

    return GenerationDefaults(
        temperature=number("temperature", can_be_zero=True) if is_sampled else None,
        top_p=number("top_p") if is_sampled else None,
        top_k=fields.integer("top_k", minimum=-1) if is_sampled and "top_k" in fields else None,
        min_p=number("min_p", can_be_zero=True) if is_sampled else None,
        repetition_penalty=number("repetition_penalty"),
        max_tokens=fields.integer("max_new_tokens") if "max_new_tokens" in fields else None,
    )


def _generation_config(path: Path) -> JsonFields:
    file = path / "generation_config.json"
    return JsonFields.read(file) if file.exists() else JsonFields(str(file), {})
