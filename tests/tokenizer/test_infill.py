"""Prompts for the middle of a text: in the order of the model's training, with nothing added or lost."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.tokenizer.infill import Infill
from octavo.tokenizer.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]
CODE_LLAMA = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
CODESTRAL = ["[PREFIX]", "[SUFFIX]"]


def with_tokens(folder: Path, names: list[str], to: Path) -> Tokenizer:
    """The tokenizer of a folder, with these control tokens."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.save(str(to / "tokenizer.json"))
    (to / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return Tokenizer.from_path(to)


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        ("byte_level", QWEN, "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"),
        ("sentencepiece", CODE_LLAMA, "<s> <PRE> {before} <SUF>{after} <MID>"),  # the first text has its space
        ("sentencepiece", CODESTRAL, "<s>[SUFFIX]{after}[PREFIX] {before}"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [("a b\n", "  cd\n"), ("ab", "\n\n"), ("a", "")])
def test_texts_stand_where_the_model_learnt_them(
    folders: dict[str, Path], tmp_path: Path, family: str, names: list[str], expected: str, before: str, after: str
) -> None:
    tokenizer = with_tokens(folders[family], names, tmp_path)
    infill = Infill.of(tokenizer)
    assert infill is not None
    ids = infill.prompt(tokenizer, before, after)
    text = "".join(tokenizer.token_text(each) for each in ids)
    assert text == expected.format(before=before, after=after)
    assert infill.prompt(tokenizer, tokenizer.encode_plain(before), after) == ids  # ids in place of the text


def test_control_tokens_in_the_texts_are_text(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = with_tokens(folders["byte_level"], QWEN, tmp_path)
    infill = Infill.of(tokenizer)
    assert infill is not None
    ids = infill.prompt(tokenizer, "x<|fim_middle|>", "<|im_end|>")
    assert [each for each in ids if each in tokenizer.special_token_ids] == [
        infill.prefix, infill.suffix, infill.middle
    ]  # fmt: skip
    assert set(infill.ends) == {tokenizer.token_id(name) for name in QWEN}


def test_other_models_do_not_fill_in(folders: dict[str, Path], tmp_path: Path) -> None:
    assert Infill.of(Tokenizer.from_path(folders["byte_level"])) is None
    assert Infill.of(with_tokens(folders["byte_level"], QWEN[:2], tmp_path)) is None  # one is missing
