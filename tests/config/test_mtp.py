"""Which heads are found, from names of tensors alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.mtp import add_tensors, make_mtp

from octavo.config.hf import read_model_config
from octavo.config.hub import separate_head
from octavo.config.model import CheckpointQuantization
from octavo.config.mtp import find_mtp
from octavo.layers.quant.base import DENSE, DenseScheme, QuantizedAtLoad
from octavo.models.mtp import HeadSchemes


@pytest.mark.parametrize(
    ("names", "chosen", "expected"),
    [
        (["a-Q8_0.gguf"], "a-Q8_0.gguf", None),
        (["a-Q8_0.gguf", "mtp-b.gguf", "mmproj-a.gguf"], "a-Q8_0.gguf", "mtp-b.gguf"),
        (["a-Q8_0.gguf", "mtp-b.gguf", "mtp-a-Q8_0.gguf"], "a-Q8_0.gguf", "mtp-a-Q8_0.gguf"),
        (["x/a.gguf", "x/mtp-a.gguf", "mtp-b.gguf"], "x/a.gguf", "x/mtp-a.gguf"),
        (["a.gguf", "mtp-b.gguf", "mtp-c.gguf"], "a.gguf", None),
    ],
)
def test_files_beside_a_model(names: list[str], chosen: str, expected: str | None) -> None:
    assert separate_head(names, chosen) == expected


def test_layers_of_a_head_that_were_not_quantized(tmp_path: Path) -> None:
    """Whatever the checkpoint says: files of AWQ and 8-bit floats often keep heads as they were."""
    reference = make_mtp("qwen3-5")
    reference.save(tmp_path)
    tensors = reference.tensors()
    add_tensors(tmp_path, {"mtp.layers.0.mlp.up_proj.weight_scale_inv": tensors["mtp.norm.weight"]})
    model = read_model_config(tmp_path, model="m")
    plain = find_mtp(model)
    assert plain is not None
    assert plain.config.dense == frozenset()
    stated = CheckpointQuantization(method="fp8", origin="config.json", values={})
    found = find_mtp(replace(model, quantization=stated))
    assert found is not None
    assert {"mtp.fc", "mtp.layers.0.mlp.down_proj"} <= found.config.dense
    assert not {"mtp.layers.0.mlp.up_proj", "lm_head"} & found.config.dense
    schemes = HeadSchemes(QuantizedAtLoad(), found.config.dense)
    assert schemes.scheme_of("mtp.fc", "plain") is DENSE
    assert isinstance(schemes.scheme_of("mtp.layers.0.mlp.up_proj", "plain"), DenseScheme)


def test_counts_in_configurations_are_no_heads(tmp_path: Path) -> None:
    """transformers writes num_nextn_predict_layers for every DeepSeek V3, and drops the weights."""
    make_mtp("deepseek-v3").target.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert find_mtp(read_model_config(tmp_path, model="m")) is None
