"""Models in GGUF files: the logits of the same weights in safetensors, whatever architecture and type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import Keys
from tests.breadth import pick
from tests.gguf.files import convert, round_matrices
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS, TinyModel

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.layers import RopeConfig
from octavo.config.model import GenerationDefaults
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.layers.linear import MergedLinear
from octavo.layers.rotary import inverse_frequencies
from octavo.loader.registry import get_model_loader

TOKENS = [5, 9, 33, 60, 4, 17, 80]
NAMES = [
    "llama", "llama-tied", "llama-biases", "llama-gqa-8", "llama-linear", "llama-yarn", "mistral-window", "qwen2",
    "qwen3-tied-gqa-8", "mixtral", "qwen2-moe", "qwen3-moe",
    "gemma3", "gemma3-capped-linear", "gemma4", "gemma4-shared", "gemma4-experts",
    "gemma2", "granite", "smollm3", "seed-oss", "phi3", "phi3-long",
]  # fmt: skip
MULTIPLES_OF_32 = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2,
                   "num_key_value_heads": 1}  # fmt: skip


def tiny(name: str, **settings: object) -> TinyModel:
    [case] = [case for case in TINY_MODELS if case.name == name]
    scale = {"query_pre_attn_scalar": 10} if case.family == "Gemma3" else {}  # the head size: files do not say it
    scale |= {"no_rope_layer_interval": 4} if case.family == "SmolLM3" else {}  # as published: nor this
    scale |= {"attention_bias": True, "attention_out_bias": False} if case.family == "SeedOss" else {}
    return TinyModel(name=name, family=case.family, settings={**case.settings, **scale, **settings})


def logits_of(path: Path, dtype: str = "float32") -> torch.Tensor:
    return PagedRunner(load(path, dtype=dtype)).step({0: TOKENS})[0]


@pytest.mark.parametrize("name", NAMES)
def test_floats_give_the_settings_and_the_logits_of_a_folder(name: str, tmp_path: Path) -> None:
    """All settings, but for what only one of the two knows: where it lies and what its floats were."""
    tiny(name).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf")
    ours, theirs = (read_model_config(path, model="m", dtype="float32") for path in (file, tmp_path))
    for field in theirs.__dataclass_fields__:
        if field not in ("path", "architecture", "bos_token_id", "eos_token_ids"):
            if field == "rotary" and name.startswith(("gemma4", "phi3")):  # zero is 1e-30, factors are float32
                assert [of.width for of in ours.rotary] == [of.width for of in theirs.rotary]
                continue
            assert getattr(ours, field) == getattr(theirs, field), field
    assert torch.equal(logits_of(file), logits_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    pick(
        [("llama", "F16"), ("llama", "BF16"), ("llama", "Q5_1"), ("llama", "Q4_0"), ("qwen3-moe", "Q8_0")],
        [(name, kind) for name in ("llama", "qwen3-moe") for kind in ("F16", "BF16", "Q8_0", "Q5_1", "Q4_0")],
    ),
)
def test_quantized_weights_give_the_logits_of_what_they_stand_for(name: str, kind: str, tmp_path: Path) -> None:
    tiny(name, **MULTIPLES_OF_32, **({"moe_intermediate_size": 32} if "moe" in name else {})).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", kind)
    round_matrices(tmp_path, kind)
    assert torch.equal(logits_of(file), logits_of(tmp_path))


def test_experts_in_one_stack_of_blocks_stay_as_they_are_stored(tmp_path: Path) -> None:
    sizes = {"global_head_dim": 64, "num_global_key_value_heads": 1, "moe_intermediate_size": 32}
    tiny("gemma4-experts", **MULTIPLES_OF_32, **sizes).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", "Q8_0")
    round_matrices(tmp_path, "Q8_0")
    assert torch.equal(logits_of(file), logits_of(tmp_path))
    model = load(file, dtype="bfloat16")
    linear = model.get_submodule("layers.0.experts.experts.0.gate_up")
    assert isinstance(linear, MergedLinear)
    assert "Q8_0" in linear.scheme.name or native_kernels() is None
    errors = (logits_of(file, "bfloat16") - logits_of(tmp_path)).abs().amax(1)
    assert errors.median() < 0.3  # tokens with experts that are about as good choose others


def test_defaults_of_sampling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under the names of llama.cpp; what it means by unusual values; what Octavo lacks or cannot use is named."""
    tiny("llama").save(tmp_path)
    keys = {"temp": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    names = {getattr(Keys.General, f"SAMPLING_{key.upper()}") for key in keys}
    assert names == {f"general.sampling.{key}" for key in keys}

    def read(**values: Any) -> GenerationDefaults:
        named = {f"general__sampling__{key}": value for key, value in values.items()}
        return read_model_config(convert(tmp_path, tmp_path / "model.gguf", **named), model="m").generation

    wanted = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    assert (read(**keys), caplog.text) == (wanted, "")
    assert read(temp=-1.0, top_k=-5, mirostat=0) == GenerationDefaults(temperature=0.0, top_k=-1)
    assert caplog.text == ""
    assert read(top_p=1.5, min_p=float("nan"), temp="hot", mirostat=2) == GenerationDefaults()
    assert caplog.text.count("has no effect") == 4


def test_factors_of_frequencies_are_divisors(tmp_path: Path) -> None:
    from tests.gguf.llama3 import write_llama3

    of_llama = read_model_config(write_llama3(tmp_path, factor=8.0), model="m").rotary[0].rope
    assert (of_llama.kind, of_llama.divisors[0], of_llama.divisors[-1]) == ("default", 1.0, 8.0)
    others = read_model_config(write_llama3(tmp_path, factor=8.0, wrong=True), model="m").rotary[0].rope
    assert others.kind == "default"
    assert [others.divisors[0], others.divisors[-1]] == pytest.approx([1.1, 8.8])
    plain = inverse_frequencies(RopeConfig(theta=others.theta), 64)[0]
    assert torch.allclose(inverse_frequencies(others, 64)[0], plain / torch.tensor(others.divisors))


@pytest.mark.parametrize("key", ["llama__rope__scaling__factor", "llama__rope__scale_linear"])
def test_a_factor_without_a_kind_is_linear(key: str, tmp_path: Path) -> None:
    tiny("llama").save(tmp_path)
    changes: dict[str, Any] = {key: 4.0}
    rope = read_model_config(convert(tmp_path, tmp_path / "model.gguf", **changes), model="m").rotary[0].rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"llama__rope__scaling__type": "longrope"},
            UnsupportedModelError,
            "llama.rope.scaling.type='longrope' is not",
        ),
        ({"llama__attention__value_length": 4}, UnsupportedModelError, "llama.attention.value_length=4 is not supp"),
        ({"llama__rope__dimension_count": 4}, UnsupportedModelError, "llama.rope.dimension_count=4 is not supported"),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__yarn_log_multiplier": 0.1,
            },
            UnsupportedModelError,
            r"yarn_log_multiplier=0\.1\d* is not supported: only 0 is",
        ),
        ({"llama__block_count": "three"}, CheckpointError, "num_hidden_layers='three': an integer is expected"),
    ],
)
def test_what_would_change_the_result_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    tiny("llama").save(tmp_path)
    with pytest.raises(error, match=message):
        read_model_config(convert(tmp_path, tmp_path / "model.gguf", **changes), model="m")


def test_formats_of_folders_do_not_read_files(tmp_path: Path) -> None:
    tiny("llama").save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf")
    model = load(file)
    with pytest.raises(InvalidParameterError, match=r"load_format='pt': auto or gguf: .*model\.gguf is a GGUF file"):
        get_model_loader(LoadConfig(load_format="pt", seed=0)).load(model)
