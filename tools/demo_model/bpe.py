"""The tokenizer: byte-level BPE trained on the corpus, with single-digit tokens."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tools.demo_model.corpus import documents
from tools.demo_model.template import TEMPLATE_PATH

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
NUM_DOCUMENTS = 30_000
# Special tokens are removed when decoding; the markers are kept, because tool-call parsers look for them.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading space, single digits (sums are done digit by digit), runs of punctuation, runs of whitespace.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges from the start of the document stream."""
    tokenizer = train_bpe(itertools.islice(documents(seed), NUM_DOCUMENTS), VOCAB_SIZE, (*SPECIAL, *MARKS))
    return with_visible_marks(tokenizer)


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """Learn a tokenizer from texts. Every byte is in the alphabet, so nothing is unknown."""
    tokenizer = Tokenizer(BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_visible_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the markers as ordinary added tokens, which decoding keeps."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(state))


def tokenizer_config(tokenizer: Tokenizer, marks: Sequence[str], template: str) -> dict[str, object]:
    """Return `tokenizer_config.json`: the chat template and special tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(token_id(tokenizer, mark)): added(mark) for mark in marks},
        "chat_template": template,
    }


def token_id(tokenizer: Tokenizer, mark: str) -> int:
    """Return the id of a marker. Raises KeyError if the tokenizer does not have it."""
    found = tokenizer.token_to_id(mark)
    if found is None:
        raise KeyError(mark)
    return found


def added(mark: str) -> dict[str, object]:
    """Return one entry of `added_tokens_decoder`."""
    token = AddedToken(mark, special=mark not in MARKS, normalized=False)
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {field: getattr(token, field) for field in fields}


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, marks: Sequence[str] = (*SPECIAL, *MARKS), template_path: Path = TEMPLATE_PATH
) -> None:
    """Write the tokenizer files of a checkpoint; `marks` are its added tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(tokenizer, marks, template_path.read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
