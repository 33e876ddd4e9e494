"""Settings that no family of Octavo's has: transformers' own code computes such a checkpoint, or its name is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.models.paged import PagedRunner, load
from tests.models.tiny import by_name

from octavo.config import fallback
from octavo.config.hf import read_model_config
from octavo.errors import UnsupportedModelError
from octavo.models import fallback_probe

_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
Odd = tuple[str, dict[str, Any]]  # a tiny model, and what is changed
_MORE: list[Odd] = [
    ("gemma3", {"rope_parameters": _YARN}),  # neither of its kinds of layers is named
    ("gemma2", {"hidden_activation": "silu"}),
    ("minimax-m2", {"hidden_act": "relu2"}),
    ("phi", {"tie_word_embeddings": True}),  # a head with biases
    ("nemotron", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),  # 3 of 12
    ("granite", {"layer_types": ["sliding_attention"] * 3}),  # which have no window
]
ODD: list[Odd] = [
    ("llama", {"hidden_act": "gelu"}),
    ("qwen3", _PARTIAL),
    ("glm4-moe", {"hidden_act": "gelu"}),  # routers' corrections are buffers
    *pick([], _MORE),
]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at checkpoints in this process: one of its own imports torch and the library."""
    monkeypatch.setattr(fallback, "probe_fallback", fallback_probe.probe)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "settings"), ODD, ids=[f"{name}-{next(iter(change))}" for name, change in ODD])
def test_logits_are_those_of_transformers(
    name: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = by_name(name)
    theirs = replace(case, settings={**case.settings, **settings}).save(tmp_path)
    runner, tokens = PagedRunner(load(tmp_path)), [(7 * index) % 90 + 3 for index in range(29)]
    assert "computed by transformers' own code" in caplog.text
    found = torch.cat([*runner.step({0: tokens[:11]}), *runner.step({0: tokens[11:]})])
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, atol=case.tolerance, rtol=0)


def test_neither_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say why; asked for Octavo alone, it asks nobody."""
    by_name("llama").build().config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "no-such"}))

    def refuse(path: Path) -> dict[str, Any]:
        raise UnsupportedModelError(f"{path.name}: transformers does not either")

    monkeypatch.setattr(fallback, "probe_fallback", refuse)
    with pytest.raises(UnsupportedModelError, match=r"='no-such' is not supported; known: silu; .* does not either"):
        read_model_config(tmp_path, model="m")
    monkeypatch.setattr(fallback, "probe_fallback", lambda path: pytest.fail("transformers was asked"))
    with pytest.raises(UnsupportedModelError, match=r"known: silu$"):
        read_model_config(tmp_path, model="m", model_impl="octavo")
