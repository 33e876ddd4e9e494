"""Targets that are folders: weights in one or several files, and settings, tokenizer and chat template beside them."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.convert.source import Checkpoint, TargetOptions, import_library
from octavo.distributed.groups import ParallelGroups, SingleRank
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.gguf.file import GgufFile
from octavo.loader.index import TENSORIZER_FILE
from octavo.loader.sharded_state import stem_of_rank
from octavo.models.weights import tensors_by_owner
from octavo.tokenizer.files import CHAT_TEMPLATE_FOLDER, TokenizerFiles, read_tokenizer_files
from octavo.worker.memory import empty_model

logger = logging.getLogger(__name__)

# Files of a folder that are copied. Weights and their indexes are rewritten.
_COPIED = ("*.json", "*.jinja", f"{CHAT_TEMPLATE_FOLDER}/*.jinja", "*.txt", "*.model", "LICENSE*")
_WRITTEN = ("config.json", "*.index.json")


def write_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files to a folder."""
    if any(table.rope.divisors for table in checkpoint.model.rotary):
        why = "its rope_freqs.weight is no scaling that config.json can name; only gguf has a place for it"
        raise UnsupportedModelError(f"{checkpoint.path}: {why}")
    write_json(folder / "config.json", checkpoint.settings)
    if (source := checkpoint.path).is_dir():
        skipped = {file for pattern in _WRITTEN for file in source.glob(pattern)}
        for file in sorted({file for pattern in _COPIED for file in source.glob(pattern)} - skipped):
            if not file.is_file():
                raise CheckpointError(f"{file}: not a file")
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        return
    ids = {key: checkpoint.settings[key] for key in ("bos_token_id", "eos_token_id") if key in checkpoint.settings}
    write_json(folder / "generation_config.json", ids)
    if "tokenizer.ggml.model" in GgufFile.read(checkpoint.path).metadata:
        _write_tokenizer(read_tokenizer_files(checkpoint.path), checkpoint.model.max_position_embeddings, folder)
    else:
        logger.warning("%s has no tokenizer: no tokenizer files are written", checkpoint.path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(files: TokenizerFiles, max_len: int, folder: Path) -> None:
    files.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        **files.named_tokens,
    }
    templates = files.chat_templates
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        (folder / "chat_template.jinja").write_text(next(iter(templates.values())), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)


Tensors = Iterable[tuple[str, torch.Tensor]]
Save = Callable[[dict[str, torch.Tensor], Path], None]


def write_shards(
    tensors: Tensors,
    folder: Path,
    save: Save,
    max_bytes: int | None,
    *,
    stem: str = "model",
    suffix: str = ".safetensors",
) -> None:
    """Save tensors to files of at most `max_bytes` of weights each (None: 2 GiB), unless one tensor alone is larger.

    The layout is that of Hugging Face checkpoints: `stem` + `suffix` for one file, `stem`-00001-of-00003 + `suffix` and
    an index for several. Only one file's tensors are in memory at a time.
    """
    contents: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, max_bytes or 2 << 30):
        contents.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        save(shard, folder / f"{len(contents)}.part")
    count = len(contents)
    names = [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    if count == 1:
        names = [stem + suffix]
    for number, name in enumerate(names, start=1):
        (folder / f"{number}.part").rename(folder / name)
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, contents, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}{suffix}.index.json", index)


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


def write_safetensors(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    write_companions(checkpoint, out)
    write_shards(checkpoint.tensors(), out, _save_safetensors, options.max_shard_bytes)


def write_torch(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    write_companions(checkpoint, out)
    write_shards(checkpoint.tensors(), out, _save_torch, options.max_shard_bytes, stem="pytorch_model", suffix=".bin")


def _save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _save_torch(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # A view would be saved with all of the storage below it, and with what other views of it share.
    alone = {
        name: tensor
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        else tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    torch.save(alone, path)


class _OneOf(SingleRank):
    """A rank of several that only divides weights: nothing is communicated."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def write_sharded(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    size = options.tensor_parallel_size or 1
    if size > checkpoint.model.max_tensor_parallel_size:
        limit = f"at most {checkpoint.model.max_tensor_parallel_size}: every rank needs an attention head"
        raise InvalidParameterError("tensor_parallel_size", size, limit)
    write_companions(checkpoint, out)
    for rank in range(size):
        shard, stem = _shard(checkpoint, rank, size), stem_of_rank(rank, size)
        write_shards(shard, out, _save_safetensors, options.max_shard_bytes, stem=stem)


def _shard(checkpoint: Checkpoint, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a rank's tensors. Every rank reads the source again, so that one layer at a time is in memory."""
    groups = ParallelGroups(tensor=_OneOf(rank, size))
    model = empty_model(checkpoint.written_model, groups, torch.device("cpu"))
    paths = {module: path for path, module in model.named_modules()}
    for owner, tensors in tensors_by_owner(model, checkpoint.tensors()):
        for name, tensor in owner.shard_of(tensors).items():
            yield f"{paths[owner]}/{name}", tensor


def write_tensorized(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    library = import_library("tensorizer.serialization", "tensorizer")
    write_companions(checkpoint, out)
    serializer = library.TensorSerializer(str(out / TENSORIZER_FILE))
    try:
        for number, (name, tensor) in enumerate(checkpoint.tensors()):
            try:
                serializer.write_tensor(number, name, library.TensorType.STATE_DICT, tensor.contiguous())
            except RuntimeError as error:  # its index has a fixed size, for some 3,000 names
                raise UnsupportedModelError(f"{name}: cannot be written in this format: {error}") from error
    finally:
        serializer.close()
