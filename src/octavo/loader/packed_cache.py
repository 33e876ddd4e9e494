"""A disk cache of packed weights: the second start maps them, without reading or packing the checkpoint.

One file per checkpoint, layout and rank, in the safetensors format. Its name is a digest of everything its content
depends on, so a file is either right or not found. Files are replaced atomically and never changed; least recently used
ones are evicted.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread, main_thread
from typing import IO

import torch
from safetensors import SafetensorError, safe_open

from octavo.config.engine import LoadConfig
from octavo.layers.table_in_file import TableInFile
from octavo.layers.weight_owner import WeightOwner
from octavo.models.interfaces import CausalLM
from octavo.models.weights import weight_slots

logger = logging.getLogger(__name__)

_WORTH_KEEPING_BYTES = 64 << 20  # less is packed faster than found
_FORM = 3  # version of file names and contents, apart from the kernels' layout
_ENDING = ".safetensors"
_UNFINISHED = ".part"
_PAGE_BYTES = 4096
_LINE_BYTES = 64  # cache line: tensors are aligned to it, or kernels would read two lines for one
_PIECE_BYTES = 4 << 20
_CHECKPOINT_FILES = (
    *("config.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.tensors", "*.index.json"),
    "*_Dense/*.safetensors",
)
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
}
Kept = Mapping[str, torch.Tensor | TableInFile]  # the contents of a file, by name


def cache_folder(what: str = "packed") -> Path:
    """Return the folder for one kind of cached files: in $OCTAVO_CACHE, or in `octavo` in the user's cache folder."""
    if named := os.environ.get("OCTAVO_CACHE"):
        return Path(named) / what
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "octavo" / what


def checkpoint_digest(path: Path, *layout: object) -> str:
    """Identify the packed form of a checkpoint by its files on disk and everything that determines the layout.

    Files are identified by inode, size and times, including ctime, which cannot be set back. Hashing a gigabyte to
    avoid reading it would gain nothing.
    """
    files = [path] if path.is_file() else sorted({file for name in _CHECKPOINT_FILES for file in path.glob(name)})
    stats = [(file.name, file.stat()) for file in files]
    facts = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for name, s in stats]
    return hashlib.sha256(json.dumps([facts, layout], default=str).encode()).hexdigest()[:32]


class PackedCache:
    """Files of packed weights in one folder, at most `max_bytes` in total."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def find(self, digest: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a file as mapped views; None if there is no such file, or it is damaged."""
        path = self._folder / (digest + _ENDING)
        if not path.is_file():
            return None
        try:
            os.utime(path)  # marks it as used now
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            logger.warning("%s is unreadable and will be rewritten: %s", path, error)
            return None

    def keep_soon(self, digest: str, tensors: Kept) -> Thread:
        """Start to `keep` tensors, in a thread that writes while this process is idle.

        Writing a gigabyte takes seconds and must not delay the first response. The end of the program waits for it.
        """
        thread = Thread(target=self.keep, args=(digest, tensors, Idleness()), name="octavo-packed-cache")
        thread.start()
        return thread

    def keep(self, digest: str, tensors: Kept, idleness: "Idleness | None" = None) -> None:
        """Write a file, at once or in idle moments. A failure is logged; the next start packs again."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        start_s = time.perf_counter()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(num_bytes):
                return
            with NamedTemporaryFile(dir=self._folder, suffix=_UNFINISHED, delete=False) as part:
                try:
                    _write(part, tensors, idleness)
                    part.flush()
                    os.replace(part.name, self._folder / (digest + _ENDING))
                except BaseException:
                    os.unlink(part.name)
                    raise
        except OSError as error:
            logger.warning("packed weights are not kept on disk: %s", error)
            return
        took_s = time.perf_counter() - start_s
        logger.info("packed weights kept in %s: %.0f MB in %.2f s", self._folder, num_bytes / 1e6, took_s)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict least recently used files until `num_bytes` more fit within the limit. Returns False if they cannot."""
        free = shutil.disk_usage(self._folder).free - (2 << 30)  # left for other writers
        if num_bytes > min(self._max_bytes, free):
            logger.info(
                "packed weights are not kept on disk: %.1f GB, where the limit is %.1f and the disk has %.1f to spare",
                *(size / 1e9 for size in (num_bytes, self._max_bytes, max(0, free))),
            )
            return False
        for file in self._folder.glob("*" + _UNFINISHED):  # its writer was killed
            if file.stat().st_mtime < time.time() - 3600:
                file.unlink(missing_ok=True)
        found = ((file.stat(), file) for file in self._folder.glob("*" + _ENDING))
        kept = sorted(found, key=lambda entry: entry[0].st_mtime_ns)
        total = sum(stat.st_size for stat, _ in kept)
        for stat, file in kept:
            if total + num_bytes <= self._max_bytes:
                break
            file.unlink(missing_ok=True)  # processes that have it mapped keep it until they end
            total -= stat.st_size
        return True


class Idleness:
    """Detects when this process does nothing except on the calling thread."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self._looked_s, self._others_s = time.monotonic(), _others_s()
        self._end_s = self._looked_s + patience_s

    def wait(self) -> None:
        """Return in an idle moment; immediately if the program is ending or has been busy for all of the patience."""
        while main_thread().is_alive() and time.monotonic() < self._end_s and not self._was_idle():
            time.sleep(0.1)

    def _was_idle(self) -> bool:
        """Whether other threads have been mostly idle since the last call."""
        before_s, others_before_s = self._looked_s, self._others_s
        self._looked_s, self._others_s = time.monotonic(), _others_s()
        return self._others_s - others_before_s < 0.2 * (self._looked_s - before_s)  # else a request is being served


def _others_s() -> float:
    return time.process_time() - time.thread_time()


def _write(file: IO[bytes], tensors: Kept, idleness: Idleness | None) -> None:
    """Write tensors one by one, aligned, and without a second copy in memory, as safetensors' own writer makes.

    Format: github.com/huggingface/safetensors, README.
    """
    header, offset = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: item[1].nbytes % _LINE_BYTES != 0)  # keeps all others aligned
    for name, tensor in ordered:
        places, dtype = [offset, offset + tensor.nbytes], _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": places}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // _PAGE_BYTES) * _PAGE_BYTES - 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        for piece in _pieces(tensor):
            if idleness:
                idleness.wait()
            file.write(piece)


def _pieces(tensor: torch.Tensor | TableInFile) -> Iterator[bytes | memoryview]:
    if isinstance(tensor, TableInFile):
        yield from tensor.pieces(_PIECE_BYTES)
    elif tensor.nbytes:
        data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        yield from (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))


class PackedModel:
    """The packed form of one model, on disk or in its layers."""

    def __init__(self, model: CausalLM, cache: PackedCache, digest: str) -> None:
        self._model, self._cache, self._digest = model, cache, digest

    @classmethod
    def of(cls, model: CausalLM, load_config: LoadConfig) -> "PackedModel | None":
        """Return None if nothing can be cached: it is disabled, or these kernels do not expose their layout."""
        kernels = model.context.kernels
        if load_config.packed_cache_bytes == 0 or kernels.layout is None:
            return None
        if load_config.tensorizer_uri is not None:  # may change without a trace in the model's folder
            return None
        tensor, experts = model.context.groups.tensor, model.context.groups.experts
        slots = {
            name: (slot.spec.shape, slot.owner.layout) for name, slot in weight_slots(model).items()
        }  # of this stage
        layout = _FORM, kernels.layout, tensor.rank, tensor.size, experts.size, slots
        digest = checkpoint_digest(Path(model.config.path), *layout)
        return cls(model, PackedCache(cache_folder(), load_config.packed_cache_bytes), digest)

    def restore(self) -> bool:
        """Restore every layer from the file. Returns False if there is none; nothing has changed then."""
        tensors = self._cache.find(self._digest)
        if tensors is None:
            return False
        by_owner: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            path, _, own_name = name.partition("/")
            by_owner[path][own_name] = tensor
        for path, owner in _owners(self._model):
            owner.adopt_packed(by_owner[path])
        self._model.mapped_bytes = sum(tensor.nbytes for tensor in tensors.values()) - self._model.bytes_in_file
        return True

    def keep(self) -> None:
        """Save the layers' packed weights, unless they are small or one of them cannot be saved."""
        tensors: dict[str, torch.Tensor | TableInFile] = {}
        for path, owner in _owners(self._model):
            packed = owner.packed_tensors()
            if packed is None:
                logger.debug("packed weights are not kept on disk: %s cannot be", path)
                return
            tensors.update({f"{path}/{name}": tensor for name, tensor in packed.items()})
        if sum(tensor.nbytes for tensor in tensors.values()) >= _WORTH_KEEPING_BYTES:
            self._cache.keep_soon(self._digest, tensors)


def _owners(model: CausalLM) -> Iterator[tuple[str, WeightOwner]]:
    for path, module in model.named_modules():
        if isinstance(module, WeightOwner):
            yield path, module
