"""Identifies an adapter by its files, given its name and folder: the part that the frontend reads, without torch."""

import threading
from collections import OrderedDict
from pathlib import Path

from octavo.config.engine import LoraConfig
from octavo.config.hub import resolve_adapter
from octavo.contracts.engine import AdapterRef
from octavo.errors import AdapterError, InvalidParameterError
from octavo.lora.adapter_config import CONFIG_FILE, read_adapter_config
from octavo.lora.folder import content_hash, weights_file
from octavo.lora_request import LoRARequest

_MAX_KNOWN = 4096

_Version = tuple[tuple[int, int, int], ...]  # inode, size and time of change of each file


class AdapterFiles:
    """Reads and hashes adapters; what has not changed is not read again. Callable from any thread."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._known: OrderedDict[Path, tuple[_Version, AdapterRef]] = OrderedDict()  # most recently used last
        self._folders: dict[str, Path] = {}  # by name, where that is no path
        self._lock = threading.Lock()

    def read(self, request: LoRARequest) -> AdapterRef:
        """Return the adapter of a request. Takes as long as reading its files once.

        Raises:
            AdapterError, CheckpointError: no adapter that is supported.
            InvalidParameterError: its rank exceeds `max_lora_rank`.
        """
        try:
            folder = self._folder(request.path)
            version = _version(folder)
        except (OSError, ValueError) as error:  # no path at all: too long, or with a null
            raise AdapterError(f"{request.path[:200]!r} cannot be read: {str(error)[:200]}") from error
        with self._lock:
            known = self._known.get(folder)
        if known is None or known[0] != version:
            known = version, self._read(request.name, folder)
        with self._lock:
            self._known[folder] = known
            self._known.move_to_end(folder)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        ref = known[1]
        return AdapterRef(name=request.name, path=ref.path, content_hash=ref.content_hash, rank=ref.rank)

    def _folder(self, path: str) -> Path:
        """Return where an adapter is; one of the Hub is looked up once."""
        if (known := self._folders.get(path)) is not None:
            return known
        folder = resolve_adapter(path).absolute()
        if folder != Path(path).absolute():
            self._folders[path] = folder
        return folder

    def _read(self, name: str, folder: Path) -> AdapterRef:
        rank, limit = read_adapter_config(folder).largest_rank, self._config.max_lora_rank
        if rank > limit:
            raise InvalidParameterError(
                "lora_request", name, f"rank {rank} exceeds max_lora_rank={limit} of this engine"
            )
        return AdapterRef(name=name, path=str(folder), content_hash=content_hash(folder), rank=rank)


def _version(folder: Path) -> _Version:
    """Return what changes when one of an adapter's files does.

    Raises:
        AdapterError: there is no adapter.
    """
    paths = folder / CONFIG_FILE, weights_file(folder)
    stats = [path.stat() for path in paths if path.exists()]  # a missing one is reported where it is read
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
