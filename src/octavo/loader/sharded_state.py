"""Weights that are divided already: each tensor-parallel rank has files of its own and reads no others.

The tensors of a file are named by the part of the model that owns them, "layers.0.attention.qkv/weight", and are what
`WeightOwner.shard_of` returns. `octavo convert --to sharded_state` writes them. Stages of a pipeline read their layers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.layers.weight_owner import WeightOwner
from octavo.loader.base import ModelLoader
from octavo.loader.index import names_by_shard
from octavo.loader.safetensors import names_in_file, read_file
from octavo.models.interfaces import CausalLM
from octavo.models.weights import process_weights_after_loading

SHARDED_FILES = "model-rank-*.safetensors"
_OTHER_RANKS = "model-rank-00000-of-[0-9][0-9][0-9][0-9][0-9]*"


def stem_of_rank(rank: int, size: int) -> str:
    """Return how the names of one rank's files begin."""
    return f"model-rank-{rank:05}-of-{size:05}"


class ShardedStateLoader(ModelLoader):
    """Reads the files of this rank."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Raise `UnsupportedModelError`: these files have no tensors of the whole model."""
        raise UnsupportedModelError(f"{model.config.path}: a sharded state has no whole tensors; use its source")

    def fill(self, model: CausalLM) -> None:
        """Load this rank's files."""
        group, folder = model.context.groups.tensor, Path(model.config.path)
        if model.context.groups.experts.size > 1:
            limit = "false: a sharded state has a shard of every expert on each rank"
            raise InvalidParameterError("enable_expert_parallel", True, limit)
        owners = {
            path: owner
            for path, owner in model.named_modules()
            if isinstance(owner, WeightOwner) and owner.checkpoint_tensors()
        }
        if "logits_head" in owners and model.config.tie_word_embeddings and not model.stage.is_first:
            owners["embedding"] = owners.pop("logits_head")  # it has a copy of the table's shard
        files = _files(folder, stem_of_rank(group.rank, group.size))
        num_missing = Counter(name.rpartition("/")[0] for names in files.values() for name in names)
        if absent := owners.keys() - num_missing.keys():
            raise CheckpointError(f"{folder}: nothing for {min(absent)!r} (and {len(absent) - 1} more)")
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for file, names in files.items():
            own = [name for name in names if name.rpartition("/")[0] in owners]
            for name, tensor in read_file(file, (), own):
                path, _, own_name = name.rpartition("/")
                found[path][own_name] = tensor
                num_missing[path] -= 1
                if num_missing[path]:
                    continue
                try:
                    owners[path].adopt_shard(found.pop(path))
                except (KeyError, ValueError, RuntimeError) as error:
                    raise CheckpointError(f"{folder}: {path!r} is not of this model or rank: {error!r}") from error
        process_weights_after_loading(model)


def _files(folder: Path, stem: str) -> dict[Path, list[str]]:
    """Return a rank's files and the names of their tensors."""
    whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if whole.is_file():
        return {whole: names_in_file(whole)}
    if index.is_file():
        return {folder / name: names for name, names in names_by_shard(index).items()}
    found = sorted({int(file.name[len("model-rank-00000-of-") :][:5]) for file in folder.glob(_OTHER_RANKS)})
    sizes = " or ".join(map(str, found))
    why = f"it was written for tensor_parallel_size={sizes}" if found else "there are no files of any rank"
    raise CheckpointError(f"{folder}: no {whole.name}: {why}")
