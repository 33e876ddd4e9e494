"""GGUF files of families with small differences: the logits of the same weights in safetensors."""

from pathlib import Path

import pytest
import torch
from tests.gguf.small import write_small
from tests.gguf.test_models import logits_of
from tests.models.tiny import by_name

NAMES = [
    "olmo2", "olmo3", "olmoe", "glm4", "glm4-moe", "minimax-m2", "ministral3", "ernie4-5", "ernie4-5-moe", "hunyuan",
    "starcoder2", "stablelm", "stablelm-parallel", "cohere", "cohere2", "exaone4", "muse-glimmer",
    "cohere-plus", "stablelm-norms", "llama4-as-published",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_floats_give_the_logits_of_safetensors(name: str, tmp_path: Path) -> None:
    by_name(name).save(tmp_path)
    found = logits_of(write_small(tmp_path, tmp_path / "model.gguf"))
    # Factors that one side has in metadata, the other in weights or sums, are rounded in other places.
    torch.testing.assert_close(found, logits_of(tmp_path), atol=2e-5, rtol=0)
