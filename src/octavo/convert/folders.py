"""Targets that are folders of shards: safetensors, and files of `torch.save`."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.convert.companions import write_companions
from octavo.convert.shards import ShardNames, write_shards
from octavo.convert.source import Checkpoint
from octavo.convert.target_options import TargetOptions

_SAFETENSORS = ShardNames("model", ".safetensors")
_TORCH = ShardNames("pytorch_model", ".bin")


def write_safetensors(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    """Write model.safetensors, or shards with an index, and the other files of a checkpoint."""
    options.refuse("safetensors", "tensor_parallel_size", "gguf_type")
    write_companions(checkpoint, out)
    write_shards(checkpoint.tensors(), out, _SAFETENSORS, save_safetensors, options.max_shard_bytes)


def write_torch(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    """Write pytorch_model.bin, or shards with an index, and the other files of a checkpoint."""
    options.refuse("pt", "tensor_parallel_size", "gguf_type")
    write_companions(checkpoint, out)
    write_shards(checkpoint.tensors(), out, _TORCH, _save_torch, options.max_shard_bytes)


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _save_torch(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # A view would be saved with all of the storage below it, and with what other views of it share.
    torch.save({name: _alone(tensor) for name, tensor in tensors.items()}, path)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
