"""How vectors are made, as files say it; what would change them is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gguf.test_gemma3 import write

from octavo.config.hf import read_model_config
from octavo.config.model import PoolingConfig
from octavo.config.pooling import read_pooling
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."


def folder(path: Path, *modules: tuple[str, dict[str, Any]]) -> Path:
    """Write a list of modules with their configurations; the transformer is the first."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{OLD}Transformer"}]
    for at, (kind, config) in enumerate(modules, 1):
        name = f"{at}_{kind.rpartition('.')[2]}"
        (path / name).mkdir(exist_ok=True)
        (path / name / "config.json").write_text(json.dumps(config))
        listed.append({"idx": at, "name": str(at), "path": name, "type": kind})
    (path / "modules.json").write_text(json.dumps(listed))
    return path


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([(f"{OLD}Pooling", {"pooling_mode_cls_token": True})], PoolingConfig(kind="cls", normalizes=False)),
        ([(f"{OLD}Pooling", {"pooling_mode_mean_tokens": True}), (f"{OLD}Normalize", {})], PoolingConfig(kind="mean")),
        (
            [(f"{NEW}pooling.Pooling", {"pooling_mode": "lasttoken"}), (f"{NEW}Normalize", {})],
            PoolingConfig(kind="last"),
        ),
        (
            [("sentence_transformers.cross_encoder.modules.LogitScore", {"true_token_id": 7, "false_token_id": 3})],
            PoolingConfig(normalizes=False, ranks=True, label_token_ids=(7, 3)),
        ),
    ],
)
def test_modules(modules: list[tuple[str, dict[str, Any]]], expected: PoolingConfig, tmp_path: Path) -> None:
    assert read_pooling(folder(tmp_path, *modules)) == expected


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([(f"{OLD}Pooling", {"pooling_mode_max_tokens": True})], UnsupportedModelError, "pooling_mode_max_tokens=True"),
        ([(f"{OLD}Pooling", {})], CheckpointError, "one of pooling_mode_cls_token"),
        ([(f"{NEW}Pooling", {"pooling_mode": "max"})], UnsupportedModelError, "pooling_mode='max'"),
        (
            [(f"{NEW}Pooling", {"pooling_mode": "mean", "include_prompt": False})],
            UnsupportedModelError,
            "include_prompt",
        ),
        ([(f"{OLD}WordWeights", {})], UnsupportedModelError, "WordWeights.*known: Transformer, Pooling"),
        (
            [(f"{OLD}Dense", {"in_features": 4, "out_features": 3, "activation_function": "torch.nn.ReLU"})],
            UnsupportedModelError,
            "activation_function='torch.nn.ReLU'",
        ),
    ],
)
def test_what_would_change_a_vector_is_refused(
    modules: list[tuple[str, dict[str, Any]]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read_pooling(folder(tmp_path, *modules))


def test_the_default_prompt_is_put_before_texts(tmp_path: Path) -> None:
    folder(tmp_path, (f"{NEW}Pooling", {"pooling_mode": "mean"}))
    said = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    found = read_pooling(tmp_path)
    assert found is not None
    assert found.prompt == "find: "


def test_gguf_files_and_the_option(tmp_path: Path) -> None:
    last = read_model_config(write(tmp_path / "last.gguf", "qwen3", pooling_type=3), model="m").pooling
    assert (last.kind, last.is_stated, last.dimensions) == ("last", True, ())
    rank = read_model_config(write(tmp_path / "rank.gguf", "qwen3", pooling_type=4), model="m").pooling
    assert rank.ranks
    none = write(tmp_path / "none.gguf", "qwen3")
    assert not read_model_config(none, model="m").pooling.is_stated
    assert read_model_config(none, model="m", pooler="mean").pooling.kind == "mean"
    assert read_model_config(none, model="m", pooler="rerank").pooling.ranks
    with pytest.raises(UnsupportedModelError, match="pooling_type=9"):
        read_model_config(write(tmp_path / "nine.gguf", "qwen3", pooling_type=9), model="m")


def test_a_classifier_says_what_it_reads(tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "id2label": {"0": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_config(tmp_path, model="m")
    assert (found.pooling.num_scores, found.max_model_len, found.has_head) == (1, 513, False)
    with pytest.raises(InvalidParameterError, match="pooler='mean'"):
        read_model_config(tmp_path, model="m", pooler="mean")
    with pytest.raises(InvalidParameterError, match="max_model_len=513: at most 512"):
        read_model_config(tmp_path, model="m", max_model_len=513)
