"""Small tokenizers of every family that Octavo decodes, made on the spot, as checkpoint folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

SENTENCE = "the quick brown fox jumps over the lazy dog; 3 naïve café naps 日本語 🙂🙂 "


def byte_level() -> Backend:
    """As Qwen and Llama 3: byte-level BPE, no space put in front, no beginning-of-sequence token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator([SENTENCE] * 4, trainer)
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("naïve €", normalized=False)])
    return backend


def sentencepiece() -> Backend:
    """As Llama 2: `▁` for spaces, byte fallback, a space in front of the text, `<s>` by the post-processor."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = ["▁", *"abcdefghé", "▁a", "▁b", "ab", "▁▁", "cd"]
    vocab |= {piece: len(vocab) + rank for rank, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁"), ("c", "d")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def metaspace() -> Backend:
    """Metaspace BPE: the first token loses its leading space."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator([SENTENCE] * 4, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>"]))
    backend.add_tokens(["▁▁x"])
    return backend


def word_level() -> Backend:
    """Whole words and no decoder: the library joins them with spaces."""
    vocab = {word: rank for rank, word in enumerate(["<unk>", "</s>", "one", "two", "three", "four"])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return backend


FAMILIES: dict[str, tuple[Callable[[], Backend], dict[str, str]]] = {
    "byte_level": (byte_level, {"eos_token": "<|im_end|>"}),
    "sentencepiece": (sentencepiece, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "metaspace": (metaspace, {"bos_token": "<s>", "unk_token": "<unk>"}),
    "word_level": (word_level, {"eos_token": "</s>"}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name -> checkpoint folder with `tokenizer.json` and `tokenizer_config.json`."""
    made = {}
    for name, (make, config) in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp(name)
        make().save(str(made[name] / "tokenizer.json"))
        (made[name] / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
