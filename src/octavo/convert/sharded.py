"""Target `sharded_state`: the weights as tensor-parallel ranks hold them, each rank's in files of its own."""

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.convert.companions import write_companions
from octavo.convert.folders import save_safetensors
from octavo.convert.shards import ShardNames, write_shards
from octavo.convert.source import Checkpoint
from octavo.convert.target_options import TargetOptions
from octavo.distributed.groups import ParallelGroups, SingleRank
from octavo.errors import InvalidParameterError
from octavo.loader.sharded_state import stem_of_rank
from octavo.models.weights import tensors_by_owner
from octavo.worker.parameters import empty_model


class _OneOf(SingleRank):
    """A rank of several that only divides weights: nothing is communicated."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def write_sharded(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    """Write the files of every rank and the other files of a checkpoint.

    Raises:
        InvalidParameterError: more ranks than attention heads.
        UnsupportedModelError: weights that cannot be divided.
    """
    options.refuse("sharded_state", "gguf_type")
    size = options.tensor_parallel_size or 1
    if size > checkpoint.model.num_heads:
        limit = f"at most {checkpoint.model.num_heads}: every rank needs an attention head"
        raise InvalidParameterError("tensor_parallel_size", size, limit)
    write_companions(checkpoint, out)
    for rank in range(size):
        names = ShardNames(stem_of_rank(rank, size), ".safetensors")
        write_shards(_shard(checkpoint, rank, size), out, names, save_safetensors, options.max_shard_bytes)


def _shard(checkpoint: Checkpoint, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a rank's tensors. Every rank reads the source again, so that one layer at a time is in memory."""
    groups = ParallelGroups(tensor=_OneOf(rank, size))
    model = empty_model(checkpoint.written_model, groups, torch.device("cpu"))
    paths = {module: path for path, module in model.named_modules()}
    for owner, tensors in tensors_by_owner(model, checkpoint.tensors()):
        for name, tensor in owner.shard_of(tensors).items():
            yield f"{paths[owner]}/{name}", tensor
