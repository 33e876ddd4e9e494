"""Layers that differ in windows, caps, sinks and rotation: against transformers' classes, and all in one model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.attention.steps import Pool, Shape, make_batch
from tests.breadth import each
from tests.distributed.ranks import run_ranks
from tests.models.mixed_attention import FAMILY, save_mixed
from tests.models.paged import DTYPES, PagedRunner, load, make_context
from tests.models.test_exactness import TOLERANCE, random_tokens
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.phi import modeling_phi
from transformers.models.smollm3 import modeling_smollm3

from octavo import LLM, SamplingParams
from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, GroupSlots
from octavo.config import families
from octavo.config.args import EngineArgs
from octavo.config.layers import RopeConfig
from octavo.distributed.groups import ParallelGroups
from octavo.inputs import Prompt
from octavo.layers.rotary import RotaryEmbedding
from octavo.worker.graph import StepGraph
from octavo.worker.worker import Worker

NUM_TOKENS = 50
SIZES = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 2}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
    "truncate": False,
}


def gemma2() -> Any:
    config = transformers.Gemma2Config(**SIZES, **WINDOWS, query_pre_attn_scalar=3, attn_logit_softcapping=2.0)
    layers = [modeling_gemma2.Gemma2Attention(config, index) for index in range(2)]
    description = {"scale": 3**-0.5, "soft_cap": 2.0}
    return config, layers, modeling_gemma2.Gemma2RotaryEmbedding(config), RopeConfig(theta=1e4), [description] * 2


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**SIZES, **WINDOWS, rope_parameters=YARN, max_position_embeddings=64)
    layers = [modeling_gpt_oss.GptOssAttention(config, index) for index in range(2)]
    rope = RopeConfig(theta=100.0, kind="yarn", factor=4.0, original_max_position=16, truncate=False)
    descriptions = [{"sinks": layer.sinks} for layer in layers]
    return config, layers, modeling_gpt_oss.GptOssRotaryEmbedding(config), rope, descriptions


def smollm3() -> Any:
    settings = {**SIZES, **WINDOWS, "use_sliding_window": True, "pad_token_id": None, "no_rope_layers": [0, 1]}
    config = transformers.SmolLM3Config(**settings)
    layers = [modeling_smollm3.SmolLM3Attention(config, index) for index in range(2)]
    rope = RopeConfig(theta=config.rope_parameters["rope_theta"])
    return config, layers, modeling_smollm3.SmolLM3RotaryEmbedding(config), rope, [{"rotary": None}, {}]


def phi() -> Any:
    settings = {**SIZES, "hidden_size": 60, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = transformers.PhiConfig(**settings, partial_rotary_factor=0.4)
    layers = [modeling_phi.PhiAttention(config, index) for index in range(2)]
    return config, layers, modeling_phi.PhiRotaryEmbedding(config), RopeConfig(theta=100.0), [{}] * 2


@each(("make", "rotary_dim"), [(gemma2, 10), (gpt_oss, 10), (smollm3, 10), (phi, 4)])
@torch.no_grad()
def test_as_in_transformers(make: Callable[[], Any], rotary_dim: int) -> None:
    """Two layers of a model, each with a KV group of its own; a prompt in three chunks of one request."""
    config, theirs, rotary, rope, descriptions = make()
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, config.hidden_size, generator=generator)
    positions = torch.arange(NUM_TOKENS)
    behind = positions.unsqueeze(1) - positions
    table = RotaryEmbedding(rope, rotary_dim, NUM_TOKENS, device=torch.device("cpu"))
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=10, block_size=8, num_blocks=20)
    pools = [Pool("auto", shape) for _ in theirs]
    first, second = (pools[0].sequence(NUM_TOKENS, seed=1) for _ in theirs)  # for their blocks
    found: list[list[torch.Tensor]] = [[], []]
    for layer in theirs:
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    for start, stop in ((0, 20), (20, 49), (49, 50)):
        batch, other = (make_batch(8, [(sequence, start, stop)]) for sequence in (first, second))
        tables = [GroupSlots(each.slot_mapping, each.block_table) for each in (batch, other)]
        batch = batch.with_groups(tables)
        plans = tuple(map(pools[0].backend.plan, batch.groups))
        step = AttentionMetadata(batch=batch, plans=plans, rotary=(table(batch.positions),))
        for index, (layer, description) in enumerate(zip(theirs, descriptions, strict=True)):
            x = hidden[start:stop]
            qkv = torch.cat([part(x) for part in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
            window = getattr(layer, "sliding_window", None)
            ours = AttentionLayer(
                num_heads=6, num_kv_heads=2, head_dim=10, sliding_window=window, kv_group=index, **description
            )
            attended = pools[index].backend.forward(qkv, pools[index].kv_cache, step, ours)
            found[index].append((layer.dense if config.model_type == "phi" else layer.o_proj)(attended))
    for index, layer in enumerate(theirs):
        window = getattr(layer, "sliding_window", None) or NUM_TOKENS
        mask = torch.zeros(behind.shape).masked_fill((behind < 0) | (behind >= window), -torch.inf)
        angles = rotary(hidden[None], positions[None])
        [expected] = layer(hidden[None], position_embeddings=angles, attention_mask=mask[None, None])[0]
        torch.testing.assert_close(torch.cat(found[index]), expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the mixed model, and the model known by its architecture's name."""
    save_mixed(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, FAMILY.name: FAMILY})
    return tmp_path


def answers(folder: Path, **options: Any) -> list[tuple[list[int], float | None]]:
    settings: dict[str, Any] = {"tokenizer": "demo", "num_kv_blocks": 64, "max_num_batched_tokens": 20, **options}
    llm = LLM(str(folder), **settings)
    prompts: list[Prompt] = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 17, 40)]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=1, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.exit()
    return [(list(output.token_ids), output.cumulative_logprob) for output in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_of_mixed_layers_recorded_chunked_and_batched(folder: Path, dtype: Any) -> None:
    """Windows have block tables of their own, and are freed; recorded is op by op, in any chunks."""
    context = make_context(DTYPES[dtype])
    if not context.attention.is_batch_invariant:
        pytest.skip(f"{context.attention.name} does not promise it")
    expected = answers(folder, dtype=dtype, enforce_eager=True)
    assert answers(folder, dtype=dtype) == expected
    assert answers(folder, dtype=dtype, max_num_batched_tokens=64, block_size=48) == expected
    worker = Worker(EngineArgs(model_name=str(folder), tokenizer="demo", num_kv_blocks=64, dtype=dtype).resolve())
    worker.load_model()
    worker.initialize_kv_cache([64, 64])
    assert isinstance(worker.runner.graph, StepGraph) is context.attention.records_calls


def test_sinks_show_and_are_sharded_with_their_heads(folder: Path) -> None:
    tokens = random_tokens(40, seed=1)
    [alone] = PagedRunner(load(folder)).step({0: tokens})

    def body(groups: ParallelGroups) -> torch.Tensor:
        return PagedRunner(load(folder, groups=groups)).step({0: tokens})[0]

    for logits in run_ranks(body, 2):
        torch.testing.assert_close(logits, alone, atol=TOLERANCE, rtol=0)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor.flip(0) if name.endswith("sinks") else tensor for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    assert (PagedRunner(load(folder)).step({0: tokens})[0] - alone).abs().max() > 0.05
