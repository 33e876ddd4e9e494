"""Files that are no adapters of this model: an error that names setting or tensor, and nothing else is disturbed."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.adapters import ALL_LINEAR, ref_of, save_adapter
from tests.lora.test_exactness import KINDS, MODELS, make_pool
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import TOLERANCE, random_tokens, reference_logits

from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import SlotFill
from octavo.errors import AdapterError, InsufficientMemoryError, UserError
from octavo.lora.files import content_hash
from octavo.lora.pool import AdapterPool

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> AdapterPool:
    folder = tmp_path_factory.mktemp("base")
    MODELS["llama"].save(folder)
    return make_pool(load(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(MODELS["llama"].build(), folder, target_modules=ALL_LINEAR)
    return folder


def copy_of(saved: Path, folder: Path, change: Callable[[Tensors], Any] = len, **settings: Any) -> Path:
    """Return a copy of an adapter with other tensors and settings."""
    tensors = load_file(saved / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    config = json.loads((saved / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **settings}))
    return folder


def refusal(pool: AdapterPool, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        pool.load(AdapterRef(name="bad", path=str(folder), content_hash="0", rank=4))
    assert str(folder) in str(caught.value)
    return str(caught.value)


SETTINGS: dict[str, Any] = {
    "peft_type": "LOHA",
    "use_dora": True,
    "lora_bias": True,
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [3],
    "alora_invocation_tokens": [1, 2],
    "novel_trick": "on",
    "r": 0,
    "lora_alpha": "many",
    "rank_pattern": {"((a+)+)+$": 4},
    "alpha_pattern": {"q_proj(": 4},
}


@pytest.mark.parametrize("key", SETTINGS)
def test_settings(key: str, pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    assert key in refusal(pool, copy_of(saved, tmp_path, **{key: SETTINGS[key]}))


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensor})


CHANGES: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "missing": ("up of [60, 4] that belongs to it is missing", drop(f"{PREFIX}.lora_B.weight")),
    "transposed": ("shape [4, 36] is expected, found [36, 4]", put(f"{PREFIX}.lora_A.weight", torch.zeros(36, 4))),
    "another rank": ("shape [4, 36] is expected, found [5, 36]", put(f"{PREFIX}.lora_A.weight", torch.zeros(5, 36))),
    "no matrix": ("found []", put(f"{PREFIX}.lora_A.weight", torch.zeros(()))),
    "empty": ("found [0, 36]", put(f"{PREFIX}.lora_A.weight", torch.zeros(0, 36))),
    "not finite": ("not finite", put(f"{PREFIX}.lora_B.weight", torch.full((60, 4), torch.inf))),
    "integers": ("torch.int32", put(f"{PREFIX}.lora_A.weight", torch.zeros(4, 36, dtype=torch.int32))),
    "twice": ("given twice", put(f"{PREFIX}.lora_A.default.weight", torch.zeros(4, 36))),
    "DoRA": ("DoRA", put(f"{PREFIX}.lora_magnitude_vector", torch.zeros(60))),
    "bias": ("biases", put(f"{PREFIX}.bias", torch.zeros(60))),
    "no such layer": ("layers.7", put("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", torch.ones(2))),
    "no such module": (
        "qkv_proj",
        put("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", torch.ones(2)),
    ),
    "a norm": ("model.norm", put("base_model.model.model.norm.weight", torch.ones(36))),
    "a whole linear": ("modules_to_save", put(f"{PREFIX}.weight", torch.ones(60, 36))),
    "no adapter's": ("lora_C", put(f"{PREFIX}.lora_C", torch.ones(1))),
    "a longer vocabulary": ("[97, 36] is expected", put("base_model.model.lm_head.weight", torch.ones(99, 36))),
    "another base": ("differs", put("base_model.model.lm_head.base_layer.weight", torch.ones(97, 36))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors(name: str, pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    expected, change = CHANGES[name]
    assert expected in refusal(pool, copy_of(saved, tmp_path, change))


def test_a_rank_over_the_limit(pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    assert "rank 13 exceeds max_lora_rank=12" in refusal(pool, copy_of(saved, tmp_path, rank_pattern={"k_proj": 13}))


def test_values_that_overflow_in_the_dtype_of_the_model(saved: Path, tmp_path: Path) -> None:
    MODELS["llama"].save(tmp_path)
    copy_of(saved, tmp_path, lora_alpha=1e30)
    assert "torch.float16" in refusal(make_pool(load(tmp_path, dtype="float16")), tmp_path)


class Runs:
    """Unpickled, it would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/octavo-was-here"),))


def test_files_of_pickles(pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    """Tensors are read from them; code is not run."""
    copy_of(saved, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    torch.save(load_file(saved / WEIGHTS), tmp_path / "adapter_model.bin")
    pool.load(ref_of(tmp_path))
    torch.save({"x": Runs()}, tmp_path / "adapter_model.bin")
    assert "code" in refusal(pool, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Runs()))
    assert "not a zip archive" in refusal(pool, tmp_path)


@pytest.mark.parametrize("length", [0, 7, 1000, -5])
def test_truncated(length: int, pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    copy_of(saved, tmp_path)
    (tmp_path / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:length])
    assert "truncated or malformed" in refusal(pool, tmp_path)


def test_missing_files(pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    assert CONFIG in refusal(pool, tmp_path)
    copy_of(saved, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert WEIGHTS in refusal(pool, tmp_path)
    with pytest.raises(AdapterError):
        content_hash(tmp_path)


def test_files_that_change_after_they_were_named(pool: AdapterPool, saved: Path, tmp_path: Path) -> None:
    ref = ref_of(copy_of(saved, tmp_path))
    copy_of(saved, tmp_path, lora_alpha=3)
    with pytest.raises(AdapterError, match="have changed"):
        pool.load(ref)


def test_no_memory_for_another_vocabulary(tmp_path: Path) -> None:
    MODELS["llama"].save(tmp_path / "base")
    save_adapter(MODELS["llama"].build(), tmp_path / "adapter", **KINDS["modules-to-save"])
    pool = make_pool(load(tmp_path / "base"), free_bytes=20_000)
    with pytest.raises(InsufficientMemoryError, match="embedding and logits head"):
        pool.load(ref_of(tmp_path / "adapter"))


def test_a_slot_serves_one_adapter_after_the_other(tmp_path: Path) -> None:
    """Of another rank, with and without a vocabulary, and adapters that change fewer layers."""
    MODELS["llama"].save(tmp_path / "base")
    model = load(tmp_path / "base")
    pool, prompt = make_pool(model), random_tokens(9, seed=5)
    evicted: list[str] = []
    for kind in ("all-linear", "modules-to-save", "some-layers", "embedding", "rslora", "head", "attention"):
        reference = save_adapter(MODELS["llama"].build(), tmp_path / kind, **KINDS[kind])
        ref = ref_of(tmp_path / kind)
        pool.load(ref, evicted)
        pool.fill([SlotFill(slot=0, content_hash=ref.content_hash)])
        evicted = [ref.content_hash]
        runner = PagedRunner(model)
        runner.adapter_slots = {0: 0}
        [logits] = runner.step({0: prompt})
        torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=TOLERANCE * 4, rtol=0)
