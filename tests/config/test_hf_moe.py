"""Experts out of `config.json`: both spellings, what absent keys mean, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.hf import read_model_config
from octavo.config.layers import ExpertsSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, InvalidParameterError, OctavoError, UnsupportedModelError

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**BASE, "architectures": ["MixtralForCausalLM"]}
QWEN2 = {**BASE, "architectures": ["Qwen2MoeForCausalLM"]}
QWEN3 = {**BASE, "architectures": ["Qwen3MoeForCausalLM"]}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    return read_model_config(write(folder, config), model="tiny")


def moe(folder: Path, config: dict[str, Any]) -> ExpertsSpec:
    result = read(folder, config).experts
    assert result is not None
    return result


def test_absent_keys_mean_what_each_architecture_says(tmp_path: Path) -> None:
    assert moe(tmp_path, MIXTRAL) == ExpertsSpec(num_experts=8, top_k=2, intermediate_size=45, renormalizes=True)
    assert moe(tmp_path, QWEN2) == ExpertsSpec(
        num_experts=60,
        top_k=4,
        intermediate_size=1408,
        shared_intermediate_size=5632,
        renormalizes=False,
    )
    assert moe(tmp_path, QWEN3) == ExpertsSpec(num_experts=128, top_k=8, intermediate_size=768, renormalizes=False)
    mixtral = read(tmp_path, MIXTRAL)
    assert (mixtral.rms_norm_eps, mixtral.rotary[0].rope.theta, mixtral.attention(0).sliding_window) == (
        1e-5,
        1e6,
        None,
    )
    spec = read(tmp_path, QWEN2).attention(0)
    assert (spec.has_bias, spec.has_out_bias) == (True, False)
    assert not read(tmp_path, {**QWEN2, "qkv_bias": False}).attention(0).has_bias
    assert read(tmp_path, QWEN3).attention(0).head_norms == "each"


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    for name in ("num_experts", "num_local_experts"):
        assert moe(tmp_path, {**QWEN3, name: 9}).num_experts == 9
    assert moe(tmp_path, {**QWEN3, "num_experts": 9, "num_local_experts": 9}).num_experts == 9
    with pytest.raises(CheckpointError, match=r"config\.json: num_experts=9: num_local_experts is 10"):
        read(tmp_path, {**QWEN3, "num_experts": 9, "num_local_experts": 10})


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def are_sparse(config: dict[str, Any]) -> list[bool]:
        return [isinstance(layer.feed_forward, ExpertsSpec) for layer in read(tmp_path, config).layers]

    assert are_sparse({**QWEN3, "decoder_sparse_step": 2}) == [False, True, False, True]
    assert are_sparse({**QWEN2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [False, True, False, False]
    assert are_sparse({**MIXTRAL, "decoder_sparse_step": 2}) == [True] * 4
    assert read(tmp_path, {**QWEN3, "mlp_only_layers": [0, 1, 2, 3]}).experts is None


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MIXTRAL, "sliding_window": 7}, (7,) * 4),
        ({**QWEN3, "sliding_window": 7}, (None,) * 4),
        ({**QWEN3, "sliding_window": 7, "use_sliding_window": True}, (7,) * 4),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (7, None, 7, None)),
        ({**QWEN2, "sliding_window": 0, "use_sliding_window": False}, (None,) * 4),
        (
            {**QWEN2, "sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4},
            (7,) * 4,
        ),
    ],
)
def test_windows(tmp_path: Path, config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, config).sliding_windows == windows


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok=9: at most .* experts .8."),
        ({**QWEN3, "num_experts": 0}, CheckpointError, "num_experts=0: at least 1"),
        ({**QWEN3, "num_experts": "8"}, CheckpointError, "num_experts='8': an integer"),
        ({**QWEN3, "decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step=0: at least 1"),
        ({**QWEN3, "mlp_only_layers": [4]}, CheckpointError, r"mlp_only_layers=\[4\]: numbers of layers below .*4"),
        ({**QWEN3, "mlp_only_layers": 1}, CheckpointError, "mlp_only_layers=1: a list of integers"),
        ({**QWEN3, "norm_topk_prob": 1}, CheckpointError, "norm_topk_prob=1: true or false"),
        ({**QWEN2, "shared_expert_intermediate_size": 0}, CheckpointError, "shared_expert_intermediate_size=0"),
        ({**QWEN3, "shared_expert_intermediate_size": 8}, UnsupportedModelError, "shared_expert_intermediate_size=8"),
        ({**MIXTRAL, "n_shared_experts": 1}, UnsupportedModelError, "n_shared_experts=1"),
        ({**BASE, "architectures": ["LlamaForCausalLM"], "num_local_experts": 8}, UnsupportedModelError, "experts=8"),
    ],
)
def test_what_cannot_be_served_names_key_and_value(
    tmp_path: Path, config: dict[str, Any], error: type[OctavoError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read(tmp_path, config)
    assert "config.json" in str(caught.value)


def test_experts_in_parallel_need_experts() -> None:
    with pytest.raises(InvalidParameterError, match="enable_expert_parallel=True: requires a MoE model; demo"):
        EngineArgs(enable_expert_parallel=True).resolve()


def test_experts_in_parallel_on_one_rank_are_said_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, QWEN3)
    EngineArgs(model_name=str(tmp_path), load_format="dummy", enable_expert_parallel=True).resolve()
    assert "enable_expert_parallel has no effect" in caplog.text
