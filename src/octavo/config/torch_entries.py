"""Where a file of `torch.save` has its tensors' values, read without torch. No code that the file names is run."""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from octavo.errors import CheckpointError

# Bytes of an element, by the class that the pickle names for its storage.
_BYTES = MappingProxyType(
    {
        **dict.fromkeys(("DoubleStorage", "LongStorage"), 8),
        **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
        **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
        **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage"), 1),
    }
)
_PICKLE = "data.pkl"
_LOCAL_HEADER, _NAME_LENGTH, _EXTRA_LENGTH = 30, slice(26, 28), slice(28, 30)  # of an archive's entry


@dataclass(frozen=True, slots=True)
class TorchEntry:
    """A tensor in the file: `num_bytes` from `start` on hold its values, and none other if it is contiguous."""

    start: int
    num_bytes: int
    shape: tuple[int, ...]
    kind: tuple[object, ...]  # type and strides


def read_entries(file: Path) -> dict[str, TorchEntry]:
    """Return the tensors of a state dict by name; kinds that `torch_pt.py` refuses are left out.

    Raises:
        CheckpointError: not an archive of torch, or damaged.
    """
    try:
        with ZipFile(file) as archive, file.open("rb") as opened:
            places = {entry.filename: entry for entry in archive.infolist()}
            name = next(name for name in places if name.endswith(_PICKLE))
            if places[name].compress_type != ZIP_STORED:
                raise CheckpointError(f"{file}: {name!r} in it is compressed; torch.save writes no such files")
            found = _Unpickler(io.BytesIO(archive.read(name))).load()
            if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
                found = found["state_dict"]
            root, tensors = name.removesuffix(_PICKLE), found.items() if isinstance(found, dict) else ()
            read = {key: _entry(value, places, f"{root}data/", opened) for key, value in tensors}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged archive or pickle makes of their readers
        raise CheckpointError(f"{file}: truncated or malformed: {error!r}") from error
    return {key: entry for key, entry in read.items() if entry is not None}


class _Made:
    """What a pickle asks to be made, by name and arguments, but not made."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args

    def __call__(self, *args: Any) -> "_Made":
        return _Made(self.name, args)

    def __setstate__(self, state: object) -> None:
        """Accept what the pickle would set."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Made(name, ())

    def persistent_load(self, pid: Any) -> Any:
        return pid  # ("storage", class, key, device, number of elements)


def _entry(value: object, places: dict[str, ZipInfo], folder: str, opened: BinaryIO) -> TorchEntry | None:
    while isinstance(value, _Made) and value.name == "_rebuild_parameter":
        value = value.args[0]
    if not isinstance(value, _Made) or value.name != "_rebuild_tensor_v2":
        return None
    (_, kind, key, *_), offset, shape, strides = value.args[:4]
    size = _BYTES[kind.name]
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    opened.seek(places[folder + key].header_offset)
    header = opened.read(_LOCAL_HEADER)
    lengths = (int.from_bytes(header[place], "little") for place in (_NAME_LENGTH, _EXTRA_LENGTH))
    start = places[folder + key].header_offset + _LOCAL_HEADER + sum(lengths)
    return TorchEntry(start + offset * size, span * size, tuple(shape), (kind.name, strides))
