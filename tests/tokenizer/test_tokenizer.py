"""The tokenizer against transformers' on the same files, and what it says about broken ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from octavo.errors import CheckpointError, InvalidParameterError
from octavo.tokenizer.tokenizer import Tokenizer

FAMILIES = ["byte_level", "sentencepiece", "metaspace", "word_level"]
TEXTS = ["", "a", "one two", "  the lazy  dog\n", "naïve € 🙂", "ab cd é", "日本語<|im_end|>x", "</s>a", "<tool_call>"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers_do(folders: dict[str, Path], family: str, text: str) -> None:
    ours, theirs = Tokenizer.from_path(folders[family]), AutoTokenizer.from_pretrained(folders[family])
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_token_ids == set(theirs.all_special_ids) | ours.special_token_ids


@pytest.mark.parametrize("declared", [True, False])
def test_add_bos_token_has_no_say_beside_a_tokenizer_json(
    folders: dict[str, Path], tmp_path: Path, declared: bool
) -> None:
    folder = _copy(folders["sentencepiece"], tmp_path, add_bos_token=not declared)
    backend = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    backend["post_processor"] = backend["post_processor"] if declared else None
    (folder / "tokenizer.json").write_text(json.dumps(backend), encoding="utf-8")
    ids = Tokenizer.from_path(folder).encode("a")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("a")
    assert (ids[0] == 1) is declared


def test_special_ids_are_those_that_decode_skips(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        tokenizer = Tokenizer.from_path(folder)
        for token_id in range(tokenizer.vocab_size):
            if tokenizer.decode([token_id], skip_special_tokens=False):
                is_skipped = tokenizer.decode([token_id]) == ""
                assert is_skipped is (token_id in tokenizer.special_token_ids)


def test_token_bytes_are_exact(folders: dict[str, Path]) -> None:
    byte_level = Tokenizer.from_path(folders["byte_level"])
    ids = byte_level.encode(" é🙂")
    assert b"".join(map(byte_level.token_bytes, ids)) == " é🙂".encode()
    assert byte_level.token_bytes(byte_level.encode("naïve €")[0]) == "naïve €".encode()
    pieces = Tokenizer.from_path(folders["sentencepiece"])
    assert [pieces.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert pieces.token_bytes(pieces.encode("a")[1]) == b" a"
    assert pieces.token_text(3 + 0xE2) == "\ufffd"


def test_ids_beyond_the_vocabulary_are_nothing(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        tokenizer = Tokenizer.from_path(folder)
        beyond = tokenizer.vocab_size + 7
        assert tokenizer.token_bytes(beyond) == b""
        assert tokenizer.token_text(beyond) == ""
        assert tokenizer.decode([beyond]) == ""


def test_limits_saved_by_training_are_lifted(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["byte_level"], tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.decode(tokenizer.encode("far more than two tokens")) == "far more than two tokens"


def test_tokens_known_to_the_config_only_are_added(folders: dict[str, Path], tmp_path: Path) -> None:
    size = Tokenizer.from_path(folders["byte_level"]).vocab_size
    added = {str(size): {"content": "<extra>", "special": True}, str(size + 1): {"content": "<more>", "special": False}}
    folder = _copy(folders["byte_level"], tmp_path, added_tokens_decoder=added)
    tokenizer = Tokenizer.from_path(folder)
    ids = tokenizer.encode("<extra>x<more>")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("<extra>x<more>")
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert tokenizer.decode(ids) == "x<more>"


def test_older_checkpoints_name_their_tokens_in_special_tokens_map(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["byte_level"], tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<tool_call>"}'
    )
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.bos_token_id == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a<tool_call>")) == "a"


def test_outputs_end_as_the_tokenizer_says_too(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["byte_level"], tmp_path, eos_token="<tool_call>", chat_template="{{ '<|im_end|>' }}")
    tokenizer = Tokenizer.from_path(folder)
    own = tokenizer.encode("<tool_call><|im_end|>", add_special_tokens=False)
    assert tokenizer.files.end_token_ids((), 10**6) == tuple(own)
    assert tokenizer.files.end_token_ids((7, own[1]), 10**6) == (7, own[1], own[0])
    assert tokenizer.files.end_token_ids((7,), min(own)) == (7,)  # the model cannot generate the others
    without = _copy(folders["byte_level"], tmp_path / "without", eos_token="<tool_call>", chat_template="x")
    assert Tokenizer.from_path(without).files.end_token_ids((), 10**6) == (own[0],)


def test_lone_surrogates_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        Tokenizer.from_path(folders["byte_level"]).encode("a\ud800b")


def test_missing_folder_and_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Tokenizer.from_path(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing$"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Nonsense"}}', "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: cannot be read"),
        ("tokenizer_config.json", b"{,}", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object, found list"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "tokenizer_config.json: malformed entry"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"9999": {"content": "<z>"}}}', "should have id 9999"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "tokenizer_config.json: malformed entry"),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}',
            "tokenizer.json: not a tokenizer",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": 5}]}',
            "tokenizer_config.json: malformed entry",
        ),
        ("tokenizer_config.json", b'{"x": ' + b"9" * 5000 + b"}", "tokenizer_config.json: not valid JSON"),
    ],
)
def test_broken_files_are_named(
    folders: dict[str, Path], tmp_path: Path, file: str, content: bytes, complaint: str
) -> None:
    folder = _copy(folders["byte_level"], tmp_path)
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.from_path(folder)


def test_files_may_begin_with_a_byte_order_mark(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["byte_level"], tmp_path, added_tokens_decoder=None)
    plain = Tokenizer.from_path(folder).encode("Hello")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert Tokenizer.from_path(folder).encode("Hello") == plain


def test_a_decoder_that_cannot_stream_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["byte_level"], tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="BPEDecoder"):
        Tokenizer.from_path(folder)


def _copy(source: Path, target: Path, **config: Any) -> Path:
    folder = target / "copy"
    shutil.copytree(source, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("parts", ["prepended", "metaspace"])
@pytest.mark.parametrize("setting", [{"add_prefix_space": False}, {"split_special_tokens": True}])
def test_settings_of_llama_tokenizers_are_those_of_transformers(
    parts: str, setting: dict[str, bool], tmp_path: Path
) -> None:
    tokens = ("<unk>", "<s>", "</s>", "▁", "h", "i", "hi", "▁hi", "▁h", "<", "s", ">", "/")
    merges = [("h", "i"), ("▁", "hi"), ("▁", "h")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if parts == "prepended":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizerFast", **named, **setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_path(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "hi hi</s>hi"
    assert list(ours.encode(text, add_special_tokens=False)) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([7, 7]) == theirs.decode([7, 7])
