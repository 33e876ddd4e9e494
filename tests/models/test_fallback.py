"""Models that transformers' own code computes, with Octavo's attention and linear layers: the library's own logits."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.breadth import RUNS_ALL, pick
from tests.distributed.ranks import run_ranks
from tests.models.paged import PagedRunner, make_context
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.config import fallback, hf
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.model import ModelConfig
from octavo.distributed.groups import ParallelGroups
from octavo.errors import UnsupportedModelError
from octavo.inputs import Prompt
from octavo.loader.registry import get_model_loader
from octavo.models import fallback_probe
from octavo.models.fallback import FallbackForCausalLM
from octavo.models.fallback_heads import joined_heads
from octavo.models.fallback_layers import is_linear

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,  # of which it warns, looking at values of ids
}
OPT = {"ffn_dim": 40, "word_embed_proj_dim": 48}
HEADS = {"head_dim": 12}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1}
BLOOM = {"vocab_size": 97, "hidden_size": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
# Learned positions and a tied head; a head of another name; norms in parallel, scaled logits, windows; norms of all
# heads together, experts that files hold one by one; ALiBi; interleaved rotation; norms behind rotation; values smaller
# than keys; sinks; capped scores; one, several and ungrouped kv heads of Falcon.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "opt": {**SMALL, **OPT},
    "gpt_neox": SMALL,
    "cohere2": {**SMALL, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "bloom": BLOOM,
    **pick(
        {},
        {
            "bloom with residuals behind norms": {**BLOOM, "apply_residual_connection_post_layernorm": True},
            "youtu": {**SMALL, **LATENT, "num_key_value_heads": 4},
            "granite_swa": SMALL,
            "vaultgemma": {**SMALL, **HEADS},
            "hunyuan_v1_moe": {**SMALL, **HEADS, "num_experts": 4, "moe_topk": 2},
            "falcon": FALCON,
            "falcon with groups": {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
            "falcon with ALiBi": {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
            "olmo2": SMALL,
            "glm4": {**SMALL, **HEADS},
            "hunyuan_v1_dense": {**SMALL, **HEADS},
            **dict.fromkeys(("apertus", "arcee", "phi", "starcoder2", "nemotron", "cohere", "olmo3", "olmo"), SMALL),
            **{kind: {**SMALL, **HEADS} for kind in ("ministral3", "glm", "helium", "gemma")},
            **dict.fromkeys(("ernie4_5", "persimmon"), SMALL),
            "gpt_bigcode": GPT,
            "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
            "phimoe": {**SMALL, "num_local_experts": 4, "sliding_window": 9},  # which only its mask knows
            "qwen2_moe": {**SMALL, "num_experts": 4, "use_sliding_window": True, "sliding_window": 9},
            "minimax_m2": {**SMALL, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
            "ernie4_5_moe": {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20},
            "glm4_moe": {**SMALL, **HEADS, **ROUTED},
        },
    ),
}


def save(kind: str, folder: Path) -> Any:
    """Save a tiny random model, and return the library's own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.partition(" ")[0], **MODELS.get(kind, SMALL))
    config._attn_implementation = "sdpa" if "ALiBi" in kind else "eager"  # the latter adds Falcon's biases twice
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or ".ln_" in name
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (is_norm and name.endswith("weight")))
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at checkpoints in this process: one of its own imports torch and the library."""
    monkeypatch.setattr(fallback, "probe_fallback", fallback_probe.probe)


def load(folder: Path) -> FallbackForCausalLM:
    return load_rank(read(folder), ParallelGroups())


def read(folder: Path) -> ModelConfig:
    config = read_model_config(folder, model="m", dtype="float32", model_impl="transformers")
    assert config.impl == "transformers"
    return config


def load_rank(config: ModelConfig, groups: ParallelGroups) -> FallbackForCausalLM:
    model = get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, make_context(groups=groups))
    assert isinstance(model, FallbackForCausalLM)
    return model


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_the_librarys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, and in a batch with a stranger."""
    monkeypatch.setattr(hf, "may_be_known", lambda fields: True)
    monkeypatch.setattr(hf, "find_family", _unknown)
    theirs, prompts = save(kind, tmp_path), [list(range(3, 26)), list(range(40, 49))]
    model = load(tmp_path)
    assert not any(map(is_linear, model.library.modules())), "layers of the library's, which kernels do not compute"
    runner = PagedRunner(model)
    first = runner.step({0: prompts[0][:11], 1: prompts[1]})
    found = [torch.cat([first[0], *runner.step({0: prompts[0][11:]})]), first[1]]
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "kind",
    [
        *("gpt_neox", "cohere2", "apertus"),
        *pick(
            (), ("arcee", "granite_swa", "olmo", "helium", "phi", "nemotron", "starcoder2", "glm4_moe", "ernie4_5_moe")
        ),
    ],
)
def test_two_ranks_by_the_librarys_plan(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one rank, from logits that are the same on both."""
    monkeypatch.setattr(hf, "may_be_known", lambda fields: True)
    monkeypatch.setattr(hf, "find_family", _unknown)
    save(kind, tmp_path)
    prompts = [list(range(3, 3 + length)) for length in (1, 4, 23, 8)]
    config = read(tmp_path)
    alone = PagedRunner(load_rank(config, ParallelGroups())).generate(prompts, 6)

    def body(groups: ParallelGroups) -> tuple[list[list[int]], torch.Tensor]:
        model = load_rank(config, groups)
        return PagedRunner(model).generate(prompts, 6), PagedRunner(model).step({0: prompts[2]})[0]

    (tokens, logits), (others, other_logits) = run_ranks(body, 2)
    assert (tokens, others) == (alone, alone)
    assert torch.equal(logits, other_logits), "ranks sample from the same logits"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gpt2", "no plan for GPT2LMHeadModel"),
        ("phi3", r"no plan that divides the heads of model\.layers\.0\.self_attn \(o_proj\)"),
    ],
)
def test_ranks_without_a_plan(kind: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "find_family", _unknown)
    monkeypatch.setattr(hf, "may_be_known", lambda fields: True)
    save(kind, tmp_path)
    config, groups = read(tmp_path), replace(ParallelGroups(), tensor=cast(Any, SimpleNamespace(rank=0, size=2)))
    with pytest.raises(UnsupportedModelError, match=f"m: tensor_parallel_size=2: .*{why}"):
        load_rank(config, groups)


def test_alibi_is_exact_in_every_dtype() -> None:
    """A score of nothing but slope times position, far beyond what bfloat16 counts to."""
    slopes, positions = torch.tensor([2.0**-3, 0.7071]), torch.tensor([0, 3, 255, 256, 4099, 65535])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        nothing = torch.zeros(1, 2, len(positions), 4, dtype=dtype)
        heads = joined_heads(nothing, nothing, nothing, 8, slopes, positions).double()  # [T, 2 + 2 + 2, 8]
        scores = (heads[:1, :2] * heads[:, 2:4]).sum(-1)  # [T, H]
        torch.testing.assert_close(scores, positions[:, None] * slopes.double(), rtol=3e-5, atol=0)


def _unknown(fields: object) -> None:
    raise UnsupportedModelError("a family of Octavo's own is of no use here")


def test_an_engine_finds_out_by_itself(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With cached prefixes and too little memory for all requests."""
    if not RUNS_ALL:  # else a process looks at the model
        request.getfixturevalue("here")
    theirs = save("gpt_neox", tmp_path)
    theirs.generation_config.eos_token_id = None
    options: dict[str, Any] = {"tokenizer": "demo", "dtype": "float32", "num_kv_blocks": 17, "block_size": 4}
    with LLM(str(tmp_path), max_num_batched_tokens=12, **options) as llm:
        prompts: list[Prompt] = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (20, 24, 9)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for _ in range(2):
            for output in llm.generate(prompts, params, use_tqdm=False):
                ids = torch.tensor([output.prompt_token_ids])
                whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
                assert output.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 16,
    "short_mscale": 1.1,  # of PhiMoE alone
    "long_mscale": 1.4,
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["phimoe", pytest.param("phi3", marks=pytest.mark.full)])
def test_angles_of_longrope_are_each_requests_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step with another whose angles are those of long contexts."""
    longrope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "num_local_experts": 4}
    monkeypatch.setitem(MODELS, kind, {**SMALL, **longrope})
    theirs = save(kind, tmp_path)
    prompts = [list(range(3, 3 + length)) for length in (7, 20)]
    options: dict[str, Any] = {"tokenizer": "demo", "dtype": "float32", "model_impl": "transformers"}
    with LLM(str(tmp_path), max_num_batched_tokens=11, block_size=4, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        inputs: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        for _ in range(9):
            with torch.inference_mode():
                prompt.append(int(theirs(torch.tensor([prompt])).logits[0, -1].argmax()))
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == prompt


@pytest.mark.usefixtures("here")
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("doge", **SMALL)
    config.architectures = ["DogeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"attention has a mask of its own"):
        fallback.probe_fallback(tmp_path)
    both_sides = {**HEADS, "use_bidirectional_attention": True}
    for kind, more, why in (
        ("gemma3_text", both_sides, "tokens attend to later ones"),
        ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 2}, "within chunks of 16 tokens"),
    ):
        AutoConfig.for_model(kind, **{**SMALL, **more}).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match=why):
            fallback_probe.probe(tmp_path)
    config = AutoConfig.for_model("mpt", vocab_size=97, d_model=48, n_layers=2, n_heads=4)
    config.architectures = ["MptForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"attention cannot be replaced"):
        fallback.probe_fallback(tmp_path)
    with pytest.raises(UnsupportedModelError, match="architecture 'MptForCausalLM' is not supported"):
        read_model_config(tmp_path, model="m", model_impl="octavo")
    monkeypatch.setattr(fallback, "find_spec", lambda name: None)
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'octavo\[transformers\]'"):
        read_model_config(tmp_path, model="m")


def test_nonsense_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "probe_fallback", lambda path: pytest.fail("a process was started"))
    for kind in ("no-such-model", "../../etc", ""):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": kind}))
        with pytest.raises(UnsupportedModelError, match="'NoSuchForCausalLM' is not supported"):
            read_model_config(tmp_path, model="m")


@pytest.mark.parametrize("kind", ["gpt_neox", "own_kind"])
def test_code_of_a_checkpoint_is_never_run(kind: str, tmp_path: Path) -> None:
    """Neither instead of the library's class, nor where the library has none."""
    save("gpt_neox", tmp_path)
    marker = tmp_path / "ran"
    imports = "from transformers import GPTNeoXConfig as OwnConfig, GPTNeoXForCausalLM as OwnModel"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\n{imports}\n")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind, "auto_map": own}))
    if kind == "gpt_neox":
        assert fallback_probe.probe(tmp_path)["architecture"] == "GPTNeoXForCausalLM"
    else:
        with pytest.raises(ValueError, match=r"custom code|trust_remote_code|not recognize|does not"):
            fallback_probe.probe(tmp_path)
    assert not marker.exists()
