"""Reads a checkpoint's tokenizer files; errors name the file that is missing or malformed.

`tokenizer.json` defines how text becomes ids, including whether a BOS token is prepended. The other files only name
special tokens and have the chat template: `tokenizer_config.json`, `special_tokens_map.json` in older checkpoints,
`chat_template.jinja`, `chat_template.json` and the folder `additional_chat_templates`; and the first may say
`add_prefix_space: false` of a Llama tokenizer, or `split_special_tokens: true`. This matches transformers 5, which also
ignores `add_bos_token` in `tokenizer_config.json` if there is a `tokenizer.json`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.errors import CheckpointError
from octavo.tokenizer.gguf import library_errors, read_gguf_tokenizer

_SPACE = "\u2581"  # SentencePiece's mark of a space
CHAT_TEMPLATE_NAMES = ("default", "tool_use")
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>"),
    *("<|return|>", "<|call|>", "<|tool_response>"),  # after a call somebody else goes on
)
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"  # where transformers saves all but the default one


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The contents of the files."""

    backend: Backend
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ... -> the token's text
    chat_templates: Mapping[str, str]  # by name: `default`, optionally `tool_use`

    def end_token_ids(self, declared: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that end an output: those `declared` with the weights, which fine-tuning tools often leave
        as they were, the tokenizer's EOS token, and the ends of turns in the chat templates.
        """
        written = [text for text in _TURN_ENDS if any(text in each for each in self.chat_templates.values())]
        own = map(self.backend.token_to_id, [self.named_tokens.get("eos_token", ""), *written])
        return tuple(dict.fromkeys((*declared, *(each for each in own if each is not None and each < vocab_size))))


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read all tokenizer files in folder `path`, or the metadata of the GGUF file `path`."""
    if path.is_file():
        backend, named, templates = read_gguf_tokenizer(path)
        return TokenizerFiles(backend=backend, named_tokens=named, chat_templates=templates)
    backend = _read_backend(path)
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(path / "special_tokens_map.json")
    if config.get("add_prefix_space") is False and config.get("tokenizer_class") in (
        "LlamaTokenizer",
        "LlamaTokenizerFast",
    ):
        _leave_out_prefix_space(backend)
    if config.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
    try:
        named = _add_tokens(backend, config)
        templates = _read_chat_templates(path, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: malformed entry: {error!r}") from error
    return TokenizerFiles(backend=backend, named_tokens=named, chat_templates=templates)


def _read_backend(path: Path) -> Backend:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(_missing_message(path))
    text = _read_text(file)
    with library_errors(f"{file}: not a tokenizer"):
        backend = Backend.from_str(text)
    backend.no_truncation()  # the file may have been saved with training limits
    backend.no_padding()
    return backend


def _leave_out_prefix_space(backend: Backend) -> None:
    """Put no space before a text where tokenizer.json does: transformers' class for Llama makes these parts anew."""
    own = json.loads(backend.to_str())
    pre, normalizer = own["pre_tokenizer"] or {}, own["normalizer"] or {}
    prepends = any(part.get("type") == "Prepend" for part in (normalizer, *normalizer.get("normalizers", ())))
    if not prepends and (pre.get("type") != "Metaspace" or pre.get("prepend_scheme") == "never"):
        return
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _missing_message(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: no such folder"
    message = f"{path / 'tokenizer.json'} is missing"
    if not any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "tekken.json")):
        return message
    how = f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    return f"{message}; this folder only has an older tokenizer format. Convert it with transformers: {how}"


def _add_tokens(backend: Backend, config: Mapping[str, Any]) -> dict[str, str]:
    """Add tokens that only `tokenizer_config.json` declares; return named tokens such as `eos_token`."""
    for token_id, value in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(text := value["content"]) is None:
            backend.add_tokens([AddedToken(**{key: value[key] for key in value if key != "__type"})])
        if (found := backend.token_to_id(text)) != int(token_id):
            raise ValueError(f"token {text!r} should have id {int(token_id)}, tokenizer.json gives {found}")
    named = {name: text for name, value in config.items() if name.endswith("_token") and (text := _token_text(value))}
    lists = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    extra = [value for each in lists for value in (each.values() if isinstance(each, dict) else each)]
    special = [*named.values(), *filter(None, map(_token_text, extra))]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return named


def _token_text(value: object) -> str | None:
    """Return a token's text, given the text itself or an object with the text in `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name. Separate files override `tokenizer_config.json`."""
    files = {name: path / CHAT_TEMPLATE_FOLDER / f"{name}.jinja" for name in CHAT_TEMPLATE_NAMES}
    separate = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if (file := path / "chat_template.jinja").is_file():
        return {"default": _read_text(file), **separate}
    found = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, str):
        found = {"default": found}
    templates = {name: found[name] for name in CHAT_TEMPLATE_NAMES if isinstance(found, dict) and name in found}
    if any(not isinstance(text, str) for text in templates.values()):
        raise TypeError("a chat template has to be text")
    return templates | separate


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in `file`; empty if there is no such file, as only `tokenizer.json` is required."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
