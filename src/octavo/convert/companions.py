"""Writes the files of a checkpoint that have no weights: settings, tokenizer, chat template."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.convert.source import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf.file import GgufFile
from octavo.tokenizer.files import CHAT_TEMPLATE_FOLDER, TokenizerFiles, read_tokenizer_files

logger = logging.getLogger(__name__)

# Files of a folder that are copied. Weights and their indexes are rewritten.
_COPIED = ("*.json", "*.jinja", f"{CHAT_TEMPLATE_FOLDER}/*.jinja", "*.txt", "*.model", "LICENSE*")
_WRITTEN = ("config.json", "*.index.json")
_TOKENIZER_KEY = "tokenizer.ggml.model"


def write_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files to a folder.

    Raises:
        CheckpointError: a file that cannot be read, or the tokenizer of a GGUF file is malformed.
        UnsupportedModelError: it is of a kind that Octavo does not read, or config.json cannot say how
            frequencies are scaled.
    """
    if checkpoint.model.rope.divisors:
        why = "its rope_freqs.weight is no scaling that config.json can name; only gguf has a place for it"
        raise UnsupportedModelError(f"{checkpoint.path}: {why}")
    write_json(folder / "config.json", checkpoint.settings)
    if checkpoint.path.is_dir():
        _copy(checkpoint.path, folder)
        return
    ids = {key: checkpoint.settings[key] for key in ("bos_token_id", "eos_token_id") if key in checkpoint.settings}
    write_json(folder / "generation_config.json", ids)
    if _TOKENIZER_KEY in GgufFile.read(checkpoint.path).metadata:
        _write_tokenizer(read_tokenizer_files(checkpoint.path), checkpoint.model.max_position_embeddings, folder)
    else:
        logger.warning("%s has no tokenizer: no tokenizer files are written", checkpoint.path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy(source: Path, folder: Path) -> None:
    skipped = {file for pattern in _WRITTEN for file in source.glob(pattern)}
    for file in sorted({file for pattern in _COPIED for file in source.glob(pattern)} - skipped):
        if not file.is_file():
            raise CheckpointError(f"{file}: not a file")
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _write_tokenizer(files: TokenizerFiles, max_len: int, folder: Path) -> None:
    files.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        **files.named_tokens,
    }
    templates = files.chat_templates
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        (folder / "chat_template.jinja").write_text(next(iter(templates.values())), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)
