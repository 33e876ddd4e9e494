"""Tokenizers of GGUF files: those of tokenizer.json, over strings that every part of them shows in."""

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.tokenizer.gguf_patterns import OTHER_NAMES, pre_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\n\n\tand a tab ", "12345 6.7e-8", "don't I'LL we've", "a\r\nb",
    "\u00e9\u00e0\u00fc \u6f22\u5b57 \U0001f642\U0001f44d\U0001f3fd", "A\u030a", "<|im_start|>user\nhi<|im_end|>",
    "CamelCase snake_case", "\u2581", "x\u200by", "\u6f22\u5b57a1\u3042 x_y=$z",
]  # fmt: skip
CORPUS = ["hello world, don't you count 12345 apples", "we've 67 trees and a CamelCase word", *TEXTS]
# The regular expressions that the families' own tokenizer.json files have.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def byte_level(pre: pre_tokenizers.PreTokenizer, *, is_composed: bool = False) -> Backend:
    backend = Backend(BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    if is_composed:
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), bytes_])


def plain() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def begins_with_bos(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)])
    return backend


# Their files say nothing about BOS; those of Llama 3 mean that it is added.
FAMILIES = {
    "gpt-2": lambda: byte_level(plain()),
    "smollm": lambda: byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain()])),
    "llama-bpe": lambda: begins_with_bos(byte_level(split(LLAMA3))),
    "llama-v3": lambda: begins_with_bos(byte_level(split(LLAMA3))),
    "lfm2": lambda: begins_with_bos(byte_level(split(LLAMA3))),
    "smaug-bpe": lambda: byte_level(split(LLAMA3)),
    "qwen2": lambda: byte_level(split(QWEN2), is_composed=True),
    "deepseek-r1-qwen": lambda: byte_level(split(QWEN2), is_composed=True),
    "gpt-4o": lambda: byte_level(split(O200K)),
    "qwen35": lambda: byte_level(split(QWEN35), is_composed=True),
    "deepseek-v3": lambda: byte_level(split(*DEEPSEEK3)),
    "glm4": lambda: byte_level(split(LLAMA3)),
    "kimi-k2": lambda: byte_level(split(KIMI)),
}


def write(path: Path, backend: Backend, pre: str, **fields: object) -> Tokenizer:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    finish(writer)
    return Tokenizer.from_path(path)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_families(pre: str, tmp_path: Path) -> None:
    backend = FAMILIES[pre]()
    found = write(tmp_path / "model.gguf", backend, pre)
    for text in TEXTS:
        assert found.encode(text) == backend.encode(text).ids, text
        assert found.decode(found.encode(text)) == backend.decode(backend.encode(text).ids)
    assert found.special_token_ids == {0, 1, 2}
    assert (found.bos_token_id, found.eos_token_id) == (0, 2)


# What only these rules do, in words of the text: their own tokenizer.json files were read for it.
WORDS = {
    "bailingmoe": ("I'D\n\n\nx 12", "I", "'D", "\n\n\n", "x", " ", "1", "2"),
    "bailingmoe2": ("it's", "it", "'s"),
    "exaone-moe": ("ab cd e\u0301f 12!//", "ab cd e\u0301f", " ", "1", "2", "!//"),
    "minicpm5": ("12345 I'll", "123", "45", " I", "'ll"),
    "afmoe": ("x1234567 \u6f22\uff66\u0e01!a", "x", "1", "234", "567", " ", "\u6f22\uff66\u0e01", "!a"),
    "tiny_aya": ("1234567 1234a don't", "1", "234", "567", " ", "123", "4", "a", " don't"),
    "cohere2moe": ("12345", "12", "345"),
    "youtu": ("a\ud55c\uff01\u3107\u3042 12", "a", "\ud55c", "\uff01", "\u3107", "\u3042", " ", "1", "2"),
    "laguna": ("a  \n\n b", "a", "  ", "\n\n", " b"),
    "spark2_5": ("a!\n\nb 12", "a", "!", "\n", "\n", "b", " ", "1", "2"),
    "ufakzeka": ("Ankara'da", "Ankara", "'da"),
    "jais-2": ("a" + " " * 8 + "b", "a", " " * 4, " " * 2, " ", " b"),
    "superbpe": ("of the 12345", "of the ", "12", "345"),
    "falcon": ("a+b\u2014c 12345`x`", "a", "+", "b", "\u2014", "c", " ", "123", "45", "`", "x", "`"),
    "bloom": ("a, b(c) d!", "a", ",", " b", "(", "c", ")", " d", "!"),
    "poro-chat": ("x\n\n y", "x", "\n\n", " y"),
    "viking": ("ab12 c", "ab", "1", "2", " c"),
    "falcon-h1": ("I'm 12345", "I", "'m", " ", "123", "45"),
    "pixtral": ("CamelCase", "CamelCase"),
    "gigachat": ("x12345", "x", "12345"),
    "mellum2": ("x12", "x", "1", "2"),
    "kanana2": ("CamelCase's", "Camel", "Case's"),
    "hy_v4": ("a_b", "a", "_b"),
    "kormo": ("12", "1", "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_words_of_a_rule(name: str) -> None:
    text, *words = WORDS[name]
    found = pre_tokenizer(OTHER_NAMES.get(name, name)).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_ends_and_templates(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    ends = {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    found = write(tmp_path / "model.gguf", FAMILIES["gpt-2"](), "gpt-2", chat_template=template, **ends)
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"
    assert (found.encode("hi")[0], found.encode("hi")[-1]) == (0, 2)
    assert found.encode("hi", add_special_tokens=False)[0] != 0
    found = write(tmp_path / "model.gguf", FAMILIES["llama-bpe"](), "llama-bpe", **{"ggml.add_bos_token": False})
    assert found.encode("hi")[0] != 0


def sentencepiece(
    path: Path, *, has_ids: bool = True, model: str = "llama", merges: list[str] | None = None, **fields: object
) -> Tokenizer:
    """Write a vocabulary whose scores prefer longer pieces, as training makes them."""
    letters = ["\u2581", *"helowrdax"]
    pieces = ["he", "ll", "hell", "hello", "\u2581w", "or", "\u2581wor", "ld", "\u2581world", "\u2581a"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    if has_ids:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    for key, value in fields.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    finish(writer)
    return Tokenizer.from_path(path)


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges by score, a space in front, bytes for what has no piece, and `<s>` unless the file says otherwise."""
    found = sentencepiece(tmp_path / "model.gguf")
    pieces = [found.token_text(index) for index in found.encode("hello world")]
    assert found.encode("hello world")[0] == 1
    assert "".join(pieces[1:]).strip() == "hello world"
    assert len(pieces) == 4  # <s>, a space, hello, world
    assert found.decode(found.encode("hello \u00e9")) == "hello \u00e9"
    assert len(found.encode("\u00e9", add_special_tokens=False)) == 3  # the space, and two bytes
    found = sentencepiece(tmp_path / "other.gguf", add_bos_token=False, add_space_prefix=False)
    assert len(found.encode("hello world")) == 2
    found = sentencepiece(tmp_path / "silent.gguf", has_ids=False)
    assert (found.encode("")[0], found.bos_token_id, found.eos_token_id) == (1, 1, 2)


def test_merges_of_gemma_4(tmp_path: Path) -> None:
    """By their order, whatever scores say; no space in front, and a begin token, whatever the file says of it."""
    merges = ["l d", "h e", "l l", "he ll", "o r", "\u2581 w"]
    found = sentencepiece(tmp_path / "model.gguf", model="gemma4", merges=merges, add_bos_token=False)
    pieces = [found.token_text(index) for index in found.encode("hello world\u00e9")]
    assert pieces[1:6] == ["hell", "o", " w", "or", "ld"]
    assert found.encode("hello world")[0] == 1
    assert found.decode(found.encode("hello \u00e9")) == "hello \u00e9"


def test_unknown_kinds_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"ggml\.pre='klingon' is not supported; known: gpt-2.*--tokenizer"):
        write(tmp_path / "model.gguf", FAMILIES["gpt-2"](), "klingon")
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "llama")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a"])
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"ggml\.model='rwkv' is not supported; known: gpt2, llama"):
        Tokenizer.from_path(tmp_path / "rwkv.gguf")
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    finish(writer)
    with pytest.raises(CheckpointError, match=r"ggml\.tokens: a list of str is expected"):
        Tokenizer.from_path(tmp_path / "none.gguf")


@pytest.mark.parametrize("merge", ["a b", "a c"])  # of the first the library makes a panic
def test_merges_of_tokens_that_there_are_not(merge: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges([merge])
    finish(writer)
    with pytest.raises(CheckpointError, match=r"model\.gguf: malformed tokenizer: "):
        Tokenizer.from_path(tmp_path / "model.gguf")
