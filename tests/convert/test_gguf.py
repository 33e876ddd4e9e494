"""`octavo convert --to gguf`: the way back from GGUF files, and what transformers and ggml's library read of them."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.breadth import pick
from tests.convert.test_convert import converted, logits_of, save
from tests.gguf.files import convert as write_gguf
from tests.gguf.files import round_matrices
from tests.gguf.test_models import MULTIPLES_OF_32, NAMES, tiny
from tests.loader.quantized_files import awq, save_pair
from tests.tokenizer.test_gguf import sentencepiece
from tokenizers import AddedToken

from octavo.config.hf import read_model_config
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.tokenizer.files import read_tokenizer_files
from octavo.tokenizer.tokenizer import Tokenizer

LLAMA3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }
}  # fmt: skip


YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "attention_factor": 1.5, "beta_fast": 12.0, "beta_slow": 2.0,
    }
}  # fmt: skip
SCALED = {"llama-3.1": LLAMA3, "llama-yarn-said": YARN}


WRITTEN = NAMES[: NAMES.index("gemma4")]


@pytest.mark.parametrize("name", [*WRITTEN[:: pick(4, 1)], *SCALED])
def test_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    tiny(name if name not in SCALED else "llama", **SCALED.get(name, {})).save(tmp_path / "source")
    source = tmp_path / "source"
    out = converted(source, tmp_path / "model.gguf", "--to", "gguf")
    assert torch.equal(logits_of(out), logits_of(source))
    ours, theirs = (read_model_config(path, model="m", dtype="float32") for path in (out, source))
    for field in theirs.__dataclass_fields__:
        # Files have no settings of Llama 3.1, but the divisors that follow from them.
        if field not in ("path", "architecture", *(["rotary"] if name == "llama-3.1" else [])):
            assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_types_hold_what_the_library_makes_of_the_weights(kind: str, tmp_path: Path) -> None:
    tiny("qwen3-moe", **MULTIPLES_OF_32, moe_intermediate_size=32).save(tmp_path / "source")
    out = converted(tmp_path / "source", tmp_path / "model.gguf", "--to", "gguf", "--gguf-type", kind)
    assert gguf.GGUFReader(out).get_tensor(0).tensor_type.name in (kind, "F32")
    round_matrices(tmp_path / "source", kind)
    assert torch.equal(logits_of(out), logits_of(tmp_path / "source"))


@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_it_is_what_the_library_writes(name: str, tmp_path: Path) -> None:
    """Tensors bit for bit, and every key that the tests' own use of the library sets."""
    source = save(name, tmp_path / "source")
    ours = gguf.GGUFReader(converted(source, tmp_path / "ours.gguf", "--to", "gguf"))
    theirs = gguf.GGUFReader(write_gguf(source, tmp_path / "theirs.gguf"))
    written = {tensor.name: tensor for tensor in ours.tensors}
    assert written.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert written[tensor.name].tensor_type == tensor.tensor_type
        assert written[tensor.name].data.tobytes() == tensor.data.tobytes(), tensor.name
    for key, field in theirs.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            assert ours.fields[key].contents() == field.contents(), key


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentencepiece_tokenizer_keeps_its_tokens(has_prefix: bool, tmp_path: Path) -> None:
    """Also user-defined ones, whose spaces are spelled otherwise in such files."""
    tiny("gemma3", vocab_size=290).save(tmp_path / "source")
    theirs = sentencepiece(tmp_path / "theirs.gguf", add_space_prefix=has_prefix)
    own = read_tokenizer_files(tmp_path / "theirs.gguf")
    own.backend.add_tokens([AddedToken("\u2581\u2581", normalized=False, special=False)])
    own.backend.save(str(tmp_path / "source" / "tokenizer.json"))
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(dict(own.named_tokens)))
    out = converted(tmp_path / "source", tmp_path / "ours.gguf", "--to", "gguf")
    ours = Tokenizer.from_path(out)
    for text in ("", "hello world", " a wor\u00e9 \U0001f600 x", "<s>hell"):
        assert ours.encode(text) == theirs.encode(text), text
    fields = gguf.GGUFReader(out).fields
    tokens, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert (tokens[279], types[279], tokens[280], types[280]) == ("  ", 4, "[PAD280]", 5)
    assert types[:4] == [2, 3, 3, 6]
    assert ours.encode("hello  world", add_special_tokens=False).count(279) == 1


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    source, plain = save("llama", tmp_path / "source"), TargetOptions()
    save("gemma3", tmp_path / "gemma")
    save_pair(tmp_path / "q", {"quant_method": "awq", "bits": 4, "group_size": 32}, lambda layer: True, awq(32))
    out = tmp_path / "model.gguf"
    for name, options, error, said in (
        (
            str(tmp_path / "q" / "quantized"),
            plain,
            UnsupportedModelError,
            r"quantized \(quant_method awq\); use the orig",
        ),
        ("demo", plain, UnsupportedModelError, "its tokenizer has no name in gguf"),
        (str(tmp_path / "gemma"), plain, UnsupportedModelError, r"query_pre_attn_scalar is 7; .* readers take 10"),
        (
            str(source),
            TargetOptions(gguf_type="Q4_0"),
            UnsupportedModelError,
            "type Q4_0: rows of 36 do not fill its bl",
        ),
        (
            str(source),
            TargetOptions(gguf_type="Q9"),
            InvalidParameterError,
            "gguf_type='Q9': one of F32, F16, BF16, Q8_0",
        ),
        (str(source), TargetOptions(tensor_parallel_size=2), InvalidParameterError, "has no effect on gguf"),
    ):
        with pytest.raises(error, match=said):
            convert(Checkpoint.open(name), out, "gguf", options)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["gemma", "q", "source"]
