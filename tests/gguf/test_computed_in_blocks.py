"""Models in GGUF files computed with the blocks as they are, beside the same weights in floats."""

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.breadth import pick
from tests.distributed.ranks import run_ranks
from tests.gguf.files import convert
from tests.gguf.test_models import MULTIPLES_OF_32, TOKENS, tiny
from tests.models.paged import PagedRunner, load, make_context

from octavo import LLM, SamplingParams
from octavo.config.args import EngineArgs
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.distributed.groups import ParallelGroups
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.kernels.dispatch import is_built
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.gguf import BlockScheme
from octavo.loader.packed_cache import PackedCache
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM

pytestmark = pytest.mark.skipif(
    not is_built() or os.environ.get("OCTAVO_CPU_LEVEL") == "torch", reason="only the C++ kernels compute with blocks"
)
OTHERS = [[3, 8, 1], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def model_file(folder: Path, name: str = "llama", kind: str = "Q8_0", **settings: Any) -> Path:
    experts = {"moe_intermediate_size": 64} if "moe" in name else {}
    tiny(name, **{**MULTIPLES_OF_32, **experts, **settings}).save(folder)
    return convert(folder, folder / f"{kind}.gguf", kind)


def mixed(path: Path, to: Path, types: dict[str, str]) -> Path:
    """Write the tensors of a file whose names contain a key in another type."""
    source = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, source.fields["general.architecture"].contents())
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in source.tensors:
        kind = next((kind for part, kind in types.items() if part in tensor.name), None)
        data, quant = tensor.data, tensor.tensor_type
        if kind is not None:
            quant = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), quant)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def schemes_of(model: CausalLM) -> dict[str, str]:
    return {name: part.scheme.name for name, part in model.named_modules() if isinstance(part, MergedLinear)}


def assert_near(path: Path) -> None:
    """The logits of the blocks are those of their values, but for the rounding of activations."""
    found = PagedRunner(load(path, dtype="bfloat16")).step({0: TOKENS})[0].float()
    expected = PagedRunner(load(path, dtype="float32")).step({0: TOKENS})[0].float()
    # By row: a token that rounding sends to another expert is far off. bfloat16 alone comes to 0.023.
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.08


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama-tied", *pick([], ["qwen3"])])
def test_logits_are_those_of_the_values(name: str, kind: str, tmp_path: Path) -> None:
    file = model_file(tmp_path, name, kind)
    model = load(file, dtype="bfloat16")
    found = {scheme for layer, scheme in schemes_of(model).items() if not layer.endswith("router")}
    assert found == {f"gguf {kind}"}
    assert_near(file)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_are_computed_as_one(name: str, tmp_path: Path) -> None:
    """Of several types, too; a rounding may send a token elsewhere, so the answer is that of another batch only."""
    file = mixed(model_file(tmp_path, name, "Q4_0"), tmp_path / "mixed.gguf", {"ffn_down_exps": "Q8_0"})
    model = load(file, dtype="bfloat16")
    schemes = schemes_of(model)
    assert schemes["layers.0.mlp.experts.0.down"] == "gguf Q8_0"
    assert schemes["layers.0.mlp.router"] == "dense"
    alone = PagedRunner(model).step({0: TOKENS})[0]
    assert torch.equal(PagedRunner(model).step({0: TOKENS, 1: OTHERS[0], 2: OTHERS[1]})[0], alone)


def test_a_row_has_one_answer_alone_in_a_batch_and_in_chunks(tmp_path: Path) -> None:
    model = load(model_file(tmp_path, kind="Q4_1"), dtype="bfloat16")
    alone = PagedRunner(model).step({0: TOKENS})[0]
    batch = PagedRunner(model).step({0: TOKENS, 1: OTHERS[0], 2: OTHERS[1]})
    assert torch.equal(batch[0], alone)
    chunked = PagedRunner(model)
    parts = [chunked.step({0: TOKENS[:3]})[0], chunked.step({0: TOKENS[3:]})[0]]
    assert torch.equal(torch.cat(parts), alone)


def test_parts_of_several_types(tmp_path: Path) -> None:
    """As in files of mixed precision: values and the second half of the MLP in more bits, a layer in floats."""
    file = model_file(tmp_path, kind="Q4_0", num_key_value_heads=2)
    types = {"attn_v": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q8_0", "attn_output": "F16", "blk.1.attn_k": "F32"}
    file = mixed(file, tmp_path / "mixed.gguf", types)
    schemes = schemes_of(load(file, dtype="bfloat16"))
    assert schemes["layers.0.attention.qkv"] == "gguf Q4_0+Q8_0"
    assert schemes["layers.1.attention.qkv"] == "dense"
    assert schemes["layers.0.mlp.gate_up"] == "gguf Q4_0+Q5_1"
    assert schemes["layers.0.attention.out"] == "dense"
    assert_near(file)


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    from octavo.worker.memory import empty_model, weights_bytes

    file = model_file(tmp_path, kind="Q4_0")
    as_blocks, as_floats = (read_model_config(file, model="m", dtype=dtype) for dtype in ("bfloat16", "float32"))
    linears = [part for part in empty_model(as_blocks).modules() if isinstance(part, MergedLinear)]
    assert all(isinstance(part.scheme, BlockScheme) for part in linears)
    assert all(part.num_bytes == part.num_weights * 18 // 32 for part in linears)
    assert weights_bytes(empty_model(as_blocks)) < weights_bytes(empty_model(as_floats)) / 6


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_packed_weights_come_back_from_the_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the embedding's rows, which stay in blocks."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("octavo.loader.packed_cache._WORTH_KEEPING_BYTES", 0)
    monkeypatch.setattr(PackedCache, "keep_soon", PackedCache.keep)
    file = model_file(tmp_path, name, "Q4_0", num_key_value_heads=2)
    file = mixed(file, tmp_path / "mixed.gguf", {"attn_v": "Q8_0", "ffn_up": "Q5_1"})
    config = read_model_config(file, model="m", dtype="bfloat16")
    load_config = LoadConfig(load_format="auto", seed=0, packed_cache_bytes=1 << 30)
    context = make_context(torch.bfloat16, checkpoint=config.quantization)
    first, second = (get_model_loader(load_config).load_model(config, context) for _ in range(2))
    assert second.mapped_bytes > 0
    assert torch.equal(PagedRunner(second).step({0: TOKENS})[0], PagedRunner(first).step({0: TOKENS})[0])


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_two_ranks_compute_their_shares_of_the_blocks(name: str, tmp_path: Path) -> None:
    """Each reads its part of the same file; sums over the ranks differ from one rank's in their rounding only."""
    file = model_file(tmp_path, name, "Q4_0", num_key_value_heads=2, intermediate_size=128)
    file = mixed(file, tmp_path / "mixed.gguf", {"ffn_down": "Q8_0", "attn_v": "Q5_1"})
    expected = PagedRunner(load(file, dtype="float32")).step({0: TOKENS})[0]

    def body(groups: ParallelGroups) -> torch.Tensor:
        return PagedRunner(load(file, dtype="bfloat16", groups=groups)).step({0: TOKENS})[0].float()

    first, second = run_ranks(body, 2)
    assert torch.equal(first, second)
    errors = (first - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.08


def test_shares_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    file = model_file(tmp_path, intermediate_size=96)

    def body(groups: ParallelGroups) -> CausalLM:
        return load(file, dtype="bfloat16", groups=groups)

    with pytest.raises(UnsupportedModelError, match=r"inputs .* of 96 are not whole groups of 32; set another tensor"):
        run_ranks(body, 2)


def test_asked_for_by_name_it_answers_as_by_default(tmp_path: Path) -> None:
    file = model_file(tmp_path)
    answers = []
    for quantization in (None, "gguf"):
        with LLM(str(file), tokenizer="demo", quantization=quantization, max_model_len=64, num_kv_blocks=8) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            [output] = llm.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def options(file: Path, **asked: Any) -> tuple[str | None, bool]:
    """Return `quantization=` as resolved, and whether blocks are computed."""
    config = EngineArgs(model_name=str(file), tokenizer="demo", **asked).resolve()
    return config.quantization, config.model.quantization is not None


def test_the_option_says_how_blocks_are_computed(tmp_path: Path) -> None:
    file = model_file(tmp_path)
    assert options(file) == (None, True)
    assert options(file, quantization="gguf") == ("gguf", True)
    assert options(file, quantization="dequantize") == (None, False)
    assert options(file, quantization="int8") == ("int8", False)
    assert options(file, dtype="float32") == (None, False)
    with pytest.raises(InvalidParameterError, match=r"quantization='gguf'.*in float32"):
        options(file, quantization="gguf", dtype="float32")
    with pytest.raises(InvalidParameterError, match=r"quantization='dequantize'.*is for GGUF files"):
        options(tmp_path, quantization="dequantize")


def with_decoded(path: Path, to: Path) -> tuple[Path, Path]:
    """Write a file with random blocks of types that are decoded, and one with their values in floats."""
    kinds, source = ["IQ2_XXS", "IQ3_S", "TQ2_0"], gguf.GGUFReader(path)
    writers = [gguf.GGUFWriter(to / f"{name}.gguf", "llama") for name in ("blocks", "floats")]
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            for writer in writers:
                writer.add_key_value(key, field.contents(), field.types[0])
    for number, tensor in enumerate(source.tensors):
        if "ffn" not in tensor.name or "norm" in tensor.name:
            for writer in writers:
                writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        kind = gguf.GGMLQuantizationType[kinds[number % len(kinds)]]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.random.default_rng(number).integers(
            0, 256, (*tensor.data.shape[:-1], tensor.shape[0] // block, size), np.uint8
        )
        place = slice(-2, None) if kind.name.startswith("TQ") else slice(0, 2)  # of the scale
        rows[..., place] = np.array([0.002], np.float16).view(np.uint8)
        data = rows.reshape(*tensor.data.shape[:-1], -1)
        writers[0].add_tensor(tensor.name, data, raw_dtype=kind)
        writers[1].add_tensor(tensor.name, gguf.quants.dequantize(data, kind))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return to / "blocks.gguf", to / "floats.gguf"


def test_types_that_are_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are computed as their values in floats are, and a warning says so."""
    file = model_file(tmp_path, "llama-tied", "F32", hidden_size=256, intermediate_size=256)
    blocks, floats = with_decoded(file, tmp_path)
    for dtype in ("float32", "bfloat16"):
        found, expected = (PagedRunner(load(path, dtype=dtype)).step({0: TOKENS})[0] for path in (blocks, floats))
        assert torch.equal(found, expected)
    assert "(IQ2_XXS, IQ3_S, TQ2_0) are decoded to floats" in caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gguf.quants", None)
        with pytest.raises(
            UnsupportedModelError, match=r"blocks\.gguf: tensors of type .* pip install -U 'octavo\[gguf\]'"
        ):
            load(blocks, dtype="float32")
