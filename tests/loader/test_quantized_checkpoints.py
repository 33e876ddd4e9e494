"""Checkpoints whose weights are quantized already: they compute what the dense weights they stand for compute."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.breadth import pick
from tests.distributed.ranks import run_ranks
from tests.loader.quantized_files import Quantize, awq, compressed, float8, gptq, save_pair
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens

from octavo.config.args import EngineArgs
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import QUANTIZATION_METHODS
from octavo.distributed.groups import ParallelGroups, Share
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.quantization import IntegerFormat
from octavo.kernels.quantize import quantized_linear
from octavo.kernels.reference import Kernels
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.grouped import GPTQScheme
from octavo.layers.quant.names import LayerNames
from octavo.layers.quant.packing import CompressedLinear, _warn_once
from octavo.layers.quant.registry import CHECKPOINT_SCHEMES
from octavo.models.interfaces import CausalLM
from octavo.worker.memory import empty_model, num_weights, weights_bytes

NUM_TOKENS = pick(5, 12)
PROMPTS = [random_tokens(length, seed=length) for length in (1, 4, 23, 8)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One form of checkpoint."""

    name: str
    settings: dict[str, Any]
    quantize: Quantize
    is_quantized: Callable[[str], bool] = field(default=lambda layer: True)


def gptq_settings(bits: int, group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": False, **others}


def compressed_settings(
    bits: int, group_size: int | None, *, is_symmetric: bool = True, is_packed: bool = True, **others: Any
) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        **others,
    }


def compressed_floats(strategy: dict[str, Any]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **strategy}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
CASES = [
    Case(name="gptq-4-64", settings=gptq_settings(4, 64), quantize=gptq(4, 64, is_symmetric=True)),
    Case(
        name="gptq-4-64-but-for-skipped-layers",
        settings=gptq_settings(4, 64, dynamic={r"-:.*layers\.1\.mlp": {}, r"-:model\.language_model.*o_proj": {}}),
        quantize=gptq(4, 64, is_symmetric=True),
        is_quantized=lambda layer: "layers.1.mlp" not in layer and not layer.endswith("o_proj"),
    ),
    Case(name="gptq-8-all", settings=gptq_settings(8, -1), quantize=gptq(8, -1, is_symmetric=True)),
    Case(
        name="gptq-4-32-asymmetric-v2-but-for-one-layer",
        settings=gptq_settings(
            4,
            32,
            sym=False,
            checkpoint_format="gptq_v2",
            modules_to_not_convert=["layers.1.mlp", "k_proj", "q_proj", "v_proj"],
        ),
        quantize=gptq(4, 32, is_symmetric=False, added=0),
        is_quantized=lambda layer: "layers.1.mlp" not in layer and layer[-6:] not in ("q_proj", "k_proj", "v_proj"),
    ),
    Case(
        name="gptq-act-order",
        settings=gptq_settings(4, 32, desc_act=True),
        quantize=gptq(4, 32, is_symmetric=True, has_order=True),
    ),
    Case(
        name="compressed-8-channel",
        settings=compressed_settings(8, None, is_packed=False, ignore=["lm_head", "re:.*layers.0.*down_proj$"]),
        quantize=compressed(8, None, is_symmetric=True, is_packed=False),
        is_quantized=lambda layer: not layer.endswith("layers.0.mlp.down_proj"),
    ),
    Case(
        name="compressed-4-32-asymmetric",
        settings=compressed_settings(4, 32, is_symmetric=False),
        quantize=compressed(4, 32, is_symmetric=False, is_packed=True),
    ),
    Case(name="awq-32", settings={**AWQ, "group_size": 32}, quantize=awq(32)),
    Case(
        name="awq-64-but-for-one-layer",
        settings={"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["layers.1.mlp"]},
        quantize=awq(64),
        is_quantized=lambda layer: "layers.1.mlp" not in layer,
    ),
]
FLOATS = [
    Case(
        name="fp8-blocks",
        settings={"quant_method": "fp8", "weight_block_size": [48, 32], "modules_to_not_convert": ["layers.1.mlp"]},
        quantize=float8((48, 32), "weight_scale_inv"),
        is_quantized=lambda layer: "layers.1.mlp" not in layer,
    ),
    Case(
        name="fp8-tensor",
        settings={"quant_method": "fp8", "activation_scheme": "dynamic"},
        quantize=float8((None, None), "weight_scale", ()),
    ),
    Case(name="fbgemm-channel", settings={"quant_method": "fbgemm_fp8"}, quantize=float8((1, None), "weight_scale")),
    Case(
        name="compressed-floats-tensor",
        settings=compressed_floats({"strategy": "tensor"}),
        quantize=float8((None, None), "weight_scale", (1,)),
    ),
    Case(
        name="compressed-floats-channel",
        settings=compressed_floats({"strategy": "channel"}),
        quantize=float8((1, None), "weight_scale"),
    ),
    Case(
        name="compressed-floats-blocks",
        settings=compressed_floats({"strategy": "block", "block_structure": [64, 64]}),
        quantize=float8((64, 64), "weight_scale"),
    ),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_floats = pytest.mark.parametrize("case", FLOATS, ids=lambda case: case.name)
Saved = Callable[[Case], Path]
needs_kernels = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels were not built, or are off")


def save(case: Case, folder: Path) -> None:
    save_pair(folder, case.settings, case.is_quantized, case.quantize)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a case once for all tests, which only read it."""
    folders: dict[str, Path] = {}

    def get(case: Case) -> Path:
        if case.name not in folders:
            folders[case.name] = tmp_path_factory.mktemp("pair")
            save(case, folders[case.name])
        return folders[case.name]

    return get


def linears(model: CausalLM) -> list[MergedLinear]:
    return [module for module in model.modules() if isinstance(module, MergedLinear)]


@by_case
def test_it_computes_what_the_dense_weights_compute(case: Case, saved: Saved) -> None:
    """In float32 no kernels compute with integers: weights stay compressed, and results are the dense model's bits."""
    folder = saved(case)
    dense, quantized = load(folder / "dense"), load(folder / "quantized")
    assert any(linear.is_compressed for linear in linears(quantized))
    assert PagedRunner(quantized).generate(PROMPTS, NUM_TOKENS) == PagedRunner(dense).generate(PROMPTS, NUM_TOKENS)
    [found], [expected] = (PagedRunner(model).step({0: PROMPTS[2]}) for model in (quantized, dense))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES[:: pick(2, 1)], ids=lambda case: case.name)
def test_two_ranks_give_the_tokens_of_one(case: Case, saved: Saved) -> None:
    """Their shares of 48 and 96 inputs end inside groups of 32 and 64."""
    folder = saved(case)
    tokens = PagedRunner(load(folder / "dense")).generate(PROMPTS, NUM_TOKENS)

    def body(groups: ParallelGroups) -> list[list[int]]:
        return PagedRunner(load(folder / "quantized", groups=groups)).generate(PROMPTS, NUM_TOKENS)

    assert run_ranks(body, 2) == [tokens, tokens]


def test_shards_of_act_order_are_the_weight(tmp_path: Path) -> None:
    """A rank has some inputs of each group: 40 of 96 that lie in groups of 32 here, padded to 32 each."""
    scheme = GPTQScheme(form=IntegerFormat(bits=4, group_size=32), is_symmetric=False, has_order=True, added_to_zeros=1)
    quantize = gptq(4, 32, is_symmetric=False, has_order=True)
    tensors = quantize(torch.randn(16, 96, generator=torch.Generator().manual_seed(1)))[0]
    whole = scheme.weight(tensors, Share.whole(16), Share.whole(96)).dequantized()
    for start, stop in ((0, 40), (40, 96)):
        part = scheme.weight(tensors, Share.whole(16), Share(start=start, stop=stop, total=96))
        assert part.format == scheme.form_of(Share(start=start, stop=stop, total=96))
        assert part.order is not None
        assert len(part.order) > stop - start
        assert torch.equal(part.dequantized(), whole[:, start:stop])


@needs_kernels
@by_case
def test_integer_kernels_compute_it_as_it_is(
    case: Case, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they read are the checkpoint's own integers: their arithmetic on those, to the last bits of bfloat16."""
    folder = saved(case)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    quantized, exact = load(folder / "quantized", dtype="bfloat16"), load(folder / "quantized")
    assert not any(linear.is_compressed for linear in linears(quantized))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for fast, plain in zip(linears(quantized), linears(exact), strict=True):
        if not isinstance(plain._packed, CompressedLinear) or fast.role != "plain" or fast.is_compressed:
            continue
        rows = x[:, : plain.inputs.size]
        weight = plain._packed.unpacked()
        columns = rows if weight.order is None else Kernels().select_columns(rows, weight.order)
        expected = quantized_linear(columns, weight, None)
        torch.testing.assert_close(fast(rows).float(), expected, rtol=2.0**-7, atol=1e-3)
        before, kept = fast(rows), fast.packed_tensors()
        assert kept is not None
        fast._columns = None
        fast.adopt_packed(kept)  # as from the cache on disk
        assert torch.equal(fast(rows), before)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for at, case in enumerate(FLOATS)
        for dtype in pick((("float32", "bfloat16")[at % 2],), ("float32", "bfloat16"))
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_floats_of_8_bits_become_the_dense_weights(
    case: Case, dtype: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernels for CPUs compute with them: memory and bits are those of the dense model."""
    folder = saved(case)
    _warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    dense, quantized = (load(folder / name, dtype=dtype) for name in ("dense", "quantized"))
    assert f"{case.settings['quant_method']}, 8-bit floats: " in caplog.text
    assert caplog.text.count("has no kernels for 8-bit floats") == 1
    [found], [expected] = (PagedRunner(model).step({0: PROMPTS[2]}) for model in (quantized, dense))
    assert torch.equal(found, expected)
    assert weights_bytes(quantized) == weights_bytes(dense)

    def body(groups: ParallelGroups) -> list[list[int]]:
        return PagedRunner(load(folder / "quantized", dtype=dtype, groups=groups)).generate(PROMPTS, NUM_TOKENS)

    if dtype == "float32":
        tokens = PagedRunner(dense).generate(PROMPTS, NUM_TOKENS)
        assert run_ranks(body, 2) == [tokens, tokens]


@needs_kernels
@by_floats
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_can_be_quantized_again(case: Case, quantization: str, saved: Saved) -> None:
    """To the bits of a dense checkpoint of the same values, and at its size."""
    folder = saved(case)
    options = EngineArgs(model_name=str(folder / "quantized"), quantization=quantization, dtype="bfloat16")  # type: ignore[arg-type]
    assert options.resolve().quantization == quantization
    dense, quantized = (
        load(folder / name, dtype="bfloat16", quantization=quantization) for name in ("dense", "quantized")
    )
    [found], [expected] = (PagedRunner(model).step({0: PROMPTS[2]}) for model in (quantized, dense))
    assert torch.equal(found, expected)
    assert weights_bytes(quantized) == weights_bytes(dense)


@needs_kernels
@by_case
def test_rows_have_the_same_bits_in_any_batch(case: Case, saved: Saved) -> None:
    folder = saved(case)
    model = load(folder / "quantized", dtype="bfloat16")
    [alone] = PagedRunner(model).step({0: PROMPTS[2]})
    runner = PagedRunner(model, num_blocks=128, seed=3)
    pieces = [runner.step({0: PROMPTS[2][:7], 1: PROMPTS[3]})[0], runner.step({1: [5], 0: PROMPTS[2][7:]})[1]]
    assert torch.equal(torch.cat(pieces), alone)


@by_case
def test_memory_follows_the_scheme(case: Case, saved: Saved) -> None:
    folder = saved(case)
    dense, quantized = (read_model_config(folder / name, model="tiny") for name in ("dense", "quantized"))
    assert num_weights(empty_model(quantized)) == num_weights(empty_model(dense))
    found, plain = weights_bytes(empty_model(quantized)), weights_bytes(empty_model(dense))
    kept = load(folder / "quantized")
    actual = 0
    for linear in linears(kept):
        packed = linear._packed
        assert packed is not None
        parts = packed.tensors().values() if isinstance(packed, CompressedLinear) else [linear.packed.weight]
        actual += sum(part.nbytes for part in parts)
    others = plain - sum(linear.num_bytes for linear in linears(empty_model(dense)))
    assert found == actual + others


def test_what_kernels_lack_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(name="", settings=gptq_settings(8, 16), quantize=gptq(8, 16, is_symmetric=True))
    save(case, tmp_path)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        load(tmp_path / "quantized", dtype="bfloat16")
    assert caplog.text.count("gptq, 8 bits in groups of 16: ") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_have_one_form_although_the_order_of_some_does_not_matter(dtype: str, tmp_path: Path) -> None:
    """With act-order in groups of 32, all 32 inputs of an expert's second linear are in one group."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    quantize = gptq(4, 32, is_symmetric=True, has_order=True)
    save_pair(tmp_path, gptq_settings(4, 32, desc_act=True), lambda layer: True, quantize, "Qwen3Moe", **sizes)
    dense, quantized = load(tmp_path / "dense", dtype=dtype), load(tmp_path / "quantized", dtype=dtype)
    [found], [expected] = (PagedRunner(model).step({0: PROMPTS[2]}) for model in (quantized, dense))
    if dtype == "float32":
        assert torch.equal(found, expected)
    else:  # attention's linears quantize their inputs where kernels compute with integers
        assert (found - expected).norm() < (0.02 if native_kernels() is None else 0.1) * expected.norm()


@needs_kernels
def test_a_bias_of_zeros_may_stand_in_the_file(tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    for value in (0.0, 1.0):
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.full((192,), value)
        save_file(tensors, path, metadata={"format": "pt"})
        if value == 0.0:
            load(tmp_path / "quantized")
        else:
            with pytest.raises(CheckpointError, match=r"up_proj\.bias' has no place"):
                load(tmp_path / "quantized")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method='bitsandbytes' is not supported; supported: awq, .* or as GGUF, or the original with",
        ),
        ({**AWQ, "bits": 3}, "bits=3 is not supported"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported; supported: 'gemm'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (compressed_floats({"strategy": "tensor_group"}), "strategy='tensor_group' is not supported"),
        (gptq_settings(3, 128), "bits=3 is not supported"),
        (gptq_settings(4, 128, checkpoint_format="marlin"), "checkpoint_format='marlin' is not supported"),
        (gptq_settings(4, 64, modules_to_not_convert=["q_proj"]), r"q_proj has dense, model.*k_proj has gptq, 4 bits"),
        (
            compressed_settings(4, 32, transform_config={"config_groups": {"R4": {"apply": [{"location": "input"}]}}}),
            "R4: apply: 0: location='input' is not supported",
        ),
        (gptq_settings(4, 32, dynamic={"+:.*mlp.*": {"bits": 8}}), r"dynamic: '\+:\.\*mlp.*: {'bits': 8} is not"),
        (compressed_settings(2, 32), "num_bits=2 is not supported; supported: 8, 4"),
        (compressed_settings(4, 32, format="marlin-24"), "format='marlin-24' is not supported"),
        (compressed_settings(4, 32, ignore=["re:*"]), "is no regular expression"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=said):
        load(tmp_path / "quantized")


LAYERS = (
    *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in (1, 10) for part in "qkvo"),
    *(f"model.layers.{layer}.mlp.{part}_proj" for layer in (1, 10) for part in ("gate", "up", "down")),
    "lm_head",
)


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("model.layers.1.mlp.down_proj", r"model\.layers\.1\.mlp\.down_proj"),
        ("model.language_model.layers.1.mlp", r"model\.layers\.1\.mlp\..*"),
        ("language_model.model.layers.1.", r"model\.layers\.1\..*"),
        ("model.language_model.lm_head", "lm_head"),
        ("layers.1", r"model\.layers\.1\..*"),
        ("attn", ".*self_attn.*"),
        ("mlp.gate", "none"),
        ("layers.10.self_attn.qkv_proj", r".*10\.self_attn\.[qkv]_proj"),
        ("v_proj", ".*v_proj"),
        ("up_proj", ".*up_proj"),
        ("gate_up_proj", ".*(gate|up)_proj"),
        ("*.layers.1.mlp.*", r"model\.layers\.1\.mlp\..*"),
        ("re:.*v_proj$", ".*v_proj"),
        (r"re:model\.language_model\.layers\.1\..*mlp", r".*\.1\.mlp.*"),
        (r"re:.*qkv_proj$", ".*[qkv]_proj"),
        (r"re:^(?!.*language_model).*$", "none"),
        (r"re:visual.*", "none"),
        (".", "none"),
    ],
)
def test_layers_are_named_in_every_spelling(name: str, matches: str) -> None:
    assert [layer for layer in LAYERS if layer in LayerNames([name])] == [
        layer for layer in LAYERS if re.fullmatch(matches, layer)
    ]


def test_scales_of_keys_and_values_are_left_alone_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = next(case for case in CASES if case.name == "compressed-4-32-asymmetric")
    save(replace(case, settings={**case.settings, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}), tmp_path)
    path = tmp_path / "quantized" / "model.safetensors"
    before, tensors = logits(load(tmp_path / "quantized")), load_file(path)
    names = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.attn.q_scale", "self_attn.k_proj.output_scale")
    scales = {f"model.layers.{layer}.{name}": torch.ones(1) for layer in (0, 1) for name in names}
    save_file({**tensors, **scales}, path, metadata={"format": "pt"})
    assert torch.equal(logits(load(tmp_path / "quantized")), before)
    assert [record.message for record in caplog.records if "are not used: keys and values" in record.message]


def logits(model: CausalLM) -> torch.Tensor:
    return PagedRunner(model).step({0: PROMPTS[1]})[0]


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    with pytest.raises(InvalidParameterError, match=r"quantization='int8': unset: .* \(quant_method gptq\)"):
        EngineArgs(model_name=str(tmp_path / "quantized"), quantization="int8").resolve()


def test_groups_of_inputs_that_are_none_are_refused(tmp_path: Path) -> None:
    save(CASES[3], tmp_path)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.g_idx"][:3] = 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="g_idx does not put 32 inputs into each group"):
        load(tmp_path / "quantized")


def test_every_known_method_has_schemes() -> None:
    assert set(CHECKPOINT_SCHEMES) == set(QUANTIZATION_METHODS)
