"""What tensors a checkpoint has, from the headers of its files: nothing is loaded. Files of torch need torch for it."""

from collections.abc import Iterator
from pathlib import Path

from octavo.config.checkpoint_files import TORCH_FILES, HeaderEntry, read_header
from octavo.errors import CheckpointError
from octavo.loader.index import SAFETENSORS_FILE, SAFETENSORS_INDEX, TENSORIZER_FILE, names_by_shard, no_weights

_TORCH_PATTERNS = ("pytorch_model.bin*", *TORCH_FILES[2:])
_UNKNOWN = -1  # where the values start


def stored_tensors(path: Path) -> Iterator[HeaderEntry]:
    """Yield the tensors of a GGUF file or of a folder; where that has several formats, those that would be loaded."""
    if path.is_file():
        from octavo.gguf.file import GgufFile  # imports numpy, which `octavo --help` does not need

        for tensor in GgufFile.read(path).tensors.values():
            yield HeaderEntry(tensor.name, tensor.shape, tensor.type.name, _UNKNOWN, tensor.data.nbytes)
    elif (path / SAFETENSORS_FILE).exists():
        yield from read_header(path / SAFETENSORS_FILE)
    elif (path / SAFETENSORS_INDEX).is_file():
        yield from _of_index(path)
    elif files := sorted(path.glob("*.safetensors")):  # a sharded state, or what fine-tuning made
        for file in files:
            yield from read_header(file)
    elif any(any(path.glob(pattern)) for pattern in _TORCH_PATTERNS):
        from octavo.loader.torch_pt import read_folder

        for name, values in read_folder(path):
            kind = str(values.dtype).removeprefix("torch.")
            yield HeaderEntry(name, tuple(values.shape), kind, _UNKNOWN, values.nbytes)
    elif (path / TENSORIZER_FILE).is_file():
        from octavo.loader.tensorized import read_index

        single = path / TENSORIZER_FILE
        with single.open("rb") as opened:
            yield from read_index(opened.read, single.stat().st_size, str(single))
    else:
        raise no_weights(path)


def _of_index(folder: Path) -> Iterator[HeaderEntry]:
    for file_name, names in names_by_shard(folder / SAFETENSORS_INDEX).items():
        found = {each.name: each for each in read_header(folder / file_name)}
        if missing := set(names).difference(found):
            why = f"tensor {min(missing)!r} is missing, although {SAFETENSORS_INDEX} lists it here"
            raise CheckpointError(f"{folder / file_name}: {why}")
        yield from (found[name] for name in names)
