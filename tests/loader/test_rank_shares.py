"""No rank copies, or even touches, more of a checkpoint than its part."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.models.paged import load
from tests.models.tiny import TinyModel
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.config.hf import read_model_config
from octavo.distributed.groups import ParallelGroups, SingleRank
from octavo.layers.vocabulary import Embedding
from octavo.worker.memory import empty_model, num_weights

_LARGE: dict[str, Any] = {
    "vocab_size": 3000,
    "hidden_size": 252,
    "intermediate_size": 1100,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
_LARGE_PAGE = 2 << 20  # the system maps a little more than is touched

CASES = [
    TinyModel(name="llama", family="Llama", settings={**_LARGE, "attention_bias": True}),
    TinyModel(name="qwen3-tied", family="Qwen3", settings={**_LARGE, "tie_word_embeddings": True}),
    TinyModel(
        name="qwen3-moe",
        family="Qwen3Moe",
        settings={**_LARGE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 300},
    ),
]


class ShareOfGroup(SingleRank):
    """A rank that loads its part alone: loading needs nobody else."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class CopiedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own lack of types
    """Counts what copies read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten._to_copy):
            source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
            self.total += source.numel() * source.element_size()
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param.name)
    request.param.save(path)
    return path


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_copies_its_part_and_no_more(folder: Path, size: int) -> None:
    config = read_model_config(folder, model="large")
    for rank in range(size):
        with CopiedBytes() as copied:
            model = load(folder, groups=ParallelGroups(tensor=ShareOfGroup(rank, size)))
        for table in model.modules():
            if isinstance(table, Embedding) and table.packed is not None:  # from where it is, without a copy
                copied.total += 4 * table.ids.size * config.hidden_size
        part = 4 * num_weights(model) - model.bytes_in_file  # float32
        assert 0.98 * part <= copied.total <= 1.02 * part


def test_parts_together_are_little_more_than_the_whole(folder: Path) -> None:
    config = read_model_config(folder, model="large")
    parts = [num_weights(empty_model(config, ParallelGroups(tensor=ShareOfGroup(rank, 3)))) for rank in range(3)]
    assert num_weights(empty_model(config)) <= sum(parts) < 1.03 * num_weights(empty_model(config))


def mapped_bytes_in_memory(path: Path) -> int:
    """Return how much of a file this process has touched through its mappings, by /proc/self/smaps."""

    def sizes() -> Iterator[int]:
        is_ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                is_ours = line.endswith(str(path))
            elif is_ours and line.startswith("Rss:"):
                yield int(line.split()[1]) * 1024

    return sum(sizes())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what was touched")
def test_a_part_of_a_tensor_in_a_file_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"w": torch.zeros(4096, 2048)}, path)  # 32 MiB
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("w")
        tensor[1024:2048].sum()
        part = 1024 * 2048 * 4
        assert part <= mapped_bytes_in_memory(path) <= part + 2 * _LARGE_PAGE
