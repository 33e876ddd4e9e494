"""Weights in several files of limited size, with an index: the layout of Hugging Face checkpoints."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.convert.companions import write_json

_MAX_BYTES = 2 << 30
Tensors = Iterable[tuple[str, torch.Tensor]]
Save = Callable[[dict[str, torch.Tensor], Path], None]


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of files: `stem` + `suffix` for one, `stem`-00001-of-00003 + `suffix` and an index for several."""

    stem: str
    suffix: str

    def of_shard(self, number: int, count: int) -> str:
        """Return the name of one of `count` files; numbers begin with 1."""
        return self.stem + self.suffix if count == 1 else f"{self.stem}-{number:05}-of-{count:05}{self.suffix}"


def write_shards(tensors: Tensors, folder: Path, names: ShardNames, save: Save, max_bytes: int | None) -> None:
    """Save tensors to files of at most `max_bytes` of weights each (None: 2 GiB), unless one tensor alone is larger.

    Only one file's tensors are in memory at a time.
    """
    contents: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, max_bytes or _MAX_BYTES):
        contents.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        save(shard, folder / f"{len(contents)}.part")
    count = len(contents)
    for number in range(1, count + 1):
        (folder / f"{number}.part").rename(folder / names.of_shard(number, count))
    if count > 1:
        weight_map = {
            name: names.of_shard(number, count) for number, shard in enumerate(contents, start=1) for name in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{names.stem}{names.suffix}.index.json", index)


def _shards(tensors: Tensors, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard
