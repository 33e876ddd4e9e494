"""Dummy weights: made from `config.json` alone, the same for the same seed, and harmless to compute with."""

from pathlib import Path

import torch
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS, TinyModel

from octavo.models.weights import weight_slots

TOKENS = [5, 9, 33, 60, 4]


def save_config(case: TinyModel, folder: Path) -> Path:
    case.build().config.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return folder


def logits_of(folder: Path, *, seed: int, dtype: str = "float32") -> torch.Tensor:
    return PagedRunner(load(folder, dtype=dtype, load_format="dummy", seed=seed)).step({0: TOKENS})[0]


def test_seed_decides(tmp_path: Path) -> None:
    folder = save_config(TINY_MODELS[0], tmp_path)
    first = logits_of(folder, seed=1)
    assert torch.equal(first, logits_of(folder, seed=1))
    assert not torch.equal(first, logits_of(folder, seed=2))


def test_half_precision(tmp_path: Path) -> None:
    logits = logits_of(save_config(TINY_MODELS[0], tmp_path), seed=0, dtype="bfloat16")
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_no_two_matrices_of_a_model_are_alike(tmp_path: Path) -> None:
    from octavo.config.engine import LoadConfig
    from octavo.loader.dummy import DummyLoader

    model = load(save_config(TINY_MODELS[0], tmp_path), load_format="dummy")
    loader = DummyLoader(LoadConfig(load_format="dummy", seed=0))
    matrices = [tensor[0].tolist() for _, tensor in loader.tensors(model) if tensor.dim() == 2]
    assert len(matrices) == sum(len(slot.spec.shape) == 2 for slot in weight_slots(model).values())
    assert len({tuple(row) for row in matrices}) == len(matrices)
