"""Every kind of adapter gives PEFT's logits and greedy tokens in float32, several of them in one batch."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.breadth import pick
from tests.lora.adapters import ATTENTION, ref_of, save_adapter
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import TOLERANCE, random_tokens, reference_logits
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig, LoraConfig
from octavo.contracts.schedule import SlotFill
from octavo.lora.pool import AdapterPool
from octavo.models.interfaces import CausalLM

MODELS = {model.name: model for model in TINY_MODELS}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION, "r": 1},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "r": 7},
    "patterns": {
        "rank_pattern": {"q_proj": 9, "model.layers.1.mlp.up_proj": 3, ".*layers.2.*down_proj": 2},
        "alpha_pattern": {"o_proj": 16, "layers.0.self_attn.q_proj": 2},
    },
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens"], "r": 5},
    "modules-to-save": {"modules_to_save": ["lm_head", "embed_tokens"], "target_modules": ATTENTION},
    "some-layers": {"layers_to_transform": [1], "target_modules": ["k_proj", "up_proj"]},
}
MIXTURES = ("Moe", "Mixtral")  # whose experts have tests of their own
FAMILIES = pick(
    ["llama-biases", "qwen3"], [name for name, case in MODELS.items() if not case.family.endswith(MIXTURES)]
)


def make_pool(model: CausalLM, *, num_slots: int = 1, free_bytes: int = 1 << 30, experts: bool = False) -> AdapterPool:
    load = LoadConfig(load_format="auto", seed=0)
    lora = LoraConfig(max_loras=num_slots, max_lora_rank=12, max_cpu_loras=num_slots, experts=experts)
    return AdapterPool(model, lora, load, lambda: free_bytes)


class Served(NamedTuple):
    """A model with adapters in its slots, and PEFT's model of each."""

    model: CausalLM
    pool: AdapterPool
    references: list[Any]


def serve(name: str, folder: Path, kinds: list[dict[str, Any]], **options: Any) -> Served:
    """Make adapters for a tiny model, and load adapter n into slot n."""
    case, references = MODELS[name], []
    case.save(folder / "base")
    model = load(folder / "base", **options)
    pool = make_pool(model, num_slots=len(kinds))
    for slot, settings in enumerate(kinds):
        path = folder / f"adapter-{slot}"
        references.append(save_adapter(case.build(), path, seed=slot, **settings))
        pool.load(ref_of(path))
        pool.fill([SlotFill(slot=slot, content_hash=ref_of(path).content_hash)])
    return Served(model, pool, references)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_kind_in_one_batch(name: str, tmp_path: Path) -> None:
    served = serve(name, tmp_path, list(KINDS.values()))
    runner, count = PagedRunner(served.model, num_blocks=128), len(KINDS)
    prompts = {request: random_tokens(11 + request, seed=request) for request in range(count + 1)}
    runner.adapter_slots = {request: request for request in range(count)}  # the last one has none
    logits = runner.step(prompts)
    base = MODELS[name].build()
    for request, reference in enumerate([*served.references, base]):
        expected = reference_logits(reference, prompts[request])
        torch.testing.assert_close(logits[request], expected, atol=TOLERANCE * 4, rtol=0)
        assert request == count or (expected - reference_logits(base, prompts[request])).abs().max() > 0.3


@pytest.mark.parametrize("kind", ["head", "embedding", "modules-to-save"])
def test_a_tied_vocabulary(kind: str, tmp_path: Path) -> None:
    served = serve("llama-tied", tmp_path, [KINDS[kind]])
    runner, prompt = PagedRunner(served.model), random_tokens(11, seed=1)
    runner.adapter_slots = {0: 0}
    logits = runner.step({0: prompt, 1: prompt})
    for found, reference in zip(logits, [served.references[0], MODELS["llama-tied"].build()], strict=True):
        torch.testing.assert_close(found, reference_logits(reference, prompt), atol=TOLERANCE * 4, rtol=0)


def test_greedy_tokens(tmp_path: Path) -> None:
    served = serve("llama", tmp_path, [KINDS["all-linear"], KINDS["patterns"]])
    runner = PagedRunner(served.model)
    runner.adapter_slots = {0: 0, 1: 1}
    prompts = [random_tokens(9, seed=request) for request in range(2)]
    for prompt, reference, tokens in zip(prompts, served.references, runner.generate(prompts, 12), strict=True):
        for token in tokens:
            assert int(reference_logits(reference, prompt)[-1].argmax()) == token
            prompt.append(token)
