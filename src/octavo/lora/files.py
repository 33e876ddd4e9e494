"""An adapter's folder in PEFT's format, read without torch: its settings, the names of its tensors, and its identity.

An adapter is read as it was trained or rejected: a setting that changes the result and that is not supported is an
error that names the file, the key and the value.
"""

import hashlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from octavo.config.engine import LoraConfig
from octavo.config.hub import resolve_adapter
from octavo.config.json_fields import JsonFields
from octavo.contracts.engine import AdapterRef
from octavo.errors import AdapterError, InvalidParameterError
from octavo.lora_request import LoRARequest

CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE = "adapter_model.safetensors"
WEIGHTS_FILES = (SAFETENSORS_FILE, "adapter_model.bin")

_MAX_KNOWN = 4096  # adapters

# Keys that change the result if set (neither null, false nor empty), and what they ask for.
_REFUSED_KEYS = {
    "use_dora": "DoRA: magnitudes apart from directions (arXiv:2402.09353)",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of lora_B",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "single trained rows of the embedding",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# Keys that say how an adapter was trained or where it is from, not what it computes.
_IGNORED_KEYS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "lora_dropout", "inference_mode"),
        *("fan_in_fan_out", "ensure_weight_tying", "megatron_config", "megatron_core", "qalora_group_size"),
        "runtime_config",
    }
)
_USED_KEYS = frozenset(
    {
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "modules_to_save", "peft_type", "r"),
        *("rank_pattern", "use_rslora"),
    }
)
# Initializations that leave the base model as it is. The others subtract the adapter's start from the base's weights.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
# Expressions of patterns: names with dots, and a few repetitions. More could keep a hostile expression busy for hours.
_EXPRESSION = re.compile(r"[\w.\-\\^$|()\[\]*+]{1,512}")
_MAX_REPETITIONS, _MAX_REPETITIONS_OF_ONE = 64, 2

TensorKind = Literal["down", "up", "embedding_down", "embedding_up", "weight", "base_weight"]

# "base_model.model." is PEFT's; what follows a "lora_A" may be the name of the adapter in a raw state dict.
_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?:(?P<lora>lora_(?:embedding_)?[AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?"
    r"|(?P<base>base_layer\.weight)"
    r"|(?:modules_to_save\.(?:[^.]+\.)?)?weight)"
)
_KINDS: dict[str, TensorKind] = {
    "lora_A": "down",
    "lora_B": "up",
    "lora_embedding_A": "embedding_down",
    "lora_embedding_B": "embedding_up",
}
_REFUSED_TENSORS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "trainable_tokens_": "single trained rows of the embedding are not supported",
    ".bias": "trained biases are not supported",
}

_Value = TypeVar("_Value")
_Version = tuple[tuple[int, int, int], ...]  # inode, size and time of change of each file


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The settings of one adapter. Module names are those of the base model's checkpoint, without ".weight"."""

    path: str  # the adapter's folder
    rank: int  # where no pattern applies
    alpha: float
    rank_pattern: Mapping[str, int]  # by a regular expression for the end of a module's name
    alpha_pattern: Mapping[str, float]
    uses_rslora: bool  # rank-stabilized: divided by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732)
    modules_to_save: tuple[str, ...]  # the last parts of names of modules that are replaced as a whole

    @property
    def largest_rank(self) -> int:
        """The rank that every layer's fits into."""
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter of one module."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of what the adapter adds to one module's output."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read `adapter_config.json` in an adapter's folder. Raises CheckpointError, AdapterError."""
    fields = JsonFields.read(folder / CONFIG_FILE)
    _refuse_unsupported(fields)
    return AdapterConfig(
        path=str(folder),
        rank=fields.integer("r", 8),
        alpha=fields.number("lora_alpha", 8, can_be_zero=True),
        rank_pattern=_pattern(fields, "rank_pattern", JsonFields.integer),
        alpha_pattern=_pattern(fields, "alpha_pattern", partial(JsonFields.number, can_be_zero=True)),
        uses_rslora=fields.flag("use_rslora", False),
        modules_to_save=tuple(fields.texts("modules_to_save")) if "modules_to_save" in fields else (),
    )


def _refuse_unsupported(fields: JsonFields) -> None:
    if (kind := fields.text("peft_type")) != "LORA":
        raise AdapterError(f"{fields.origin}: peft_type={kind!r} is not supported; known: LORA")
    for key, value in fields.values.items():
        if key in _USED_KEYS or key in _IGNORED_KEYS or value in (False, "", [], {}):
            continue
        what = _REFUSED_KEYS.get(key, "unknown, and it may change what the adapter computes")
        raise AdapterError(f"{fields.origin}: {key}={value!r} is not supported: {what}")
    if (bias := fields.text("bias", "none")) != "none":
        raise AdapterError(f"{fields.origin}: bias={bias!r} is not supported: only 'none' is, no trained biases")
    start = fields.values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        how = "save it with path_initial_model_for_weight_conversion, which makes a plain adapter of it"
        raise AdapterError(f"{fields.origin}: init_lora_weights={start!r} changes the base model's weights; {how}")


def _pattern(fields: JsonFields, key: str, read: Callable[[JsonFields, str], _Value]) -> dict[str, _Value]:
    """Return the values of a pattern's keys, which are regular expressions."""
    patterns = fields.nested(key)
    repetitions = [len(re.findall(r"[*+]", expression)) for expression in patterns.values]
    if sum(repetitions) > _MAX_REPETITIONS:
        raise AdapterError(f"{patterns.origin}: more than {_MAX_REPETITIONS} repetitions (* and +) in its expressions")
    for expression, count in zip(patterns.values, repetitions, strict=True):
        is_plain = _EXPRESSION.fullmatch(expression) and not re.search(r"\)[*+]", expression)
        if not is_plain or count > _MAX_REPETITIONS_OF_ONE:
            limit = f"names of modules with at most {_MAX_REPETITIONS_OF_ONE} of * and +, not after a bracket, are"
            raise AdapterError(f"{patterns.origin}: the expression {expression[:80]!r} is not supported: {limit}")
        try:
            re.compile(expression)
        except re.error as error:
            why = f"{expression[:80]!r} is no regular expression: {error}"
            raise AdapterError(f"{patterns.origin}: {why}") from error
    return {expression: read(patterns, expression) for expression in patterns.values}


def _of_pattern(pattern: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Return the value of the first expression that matches the end of a module's name."""
    found = (value for expression, value in pattern.items() if re.match(rf"(.*\.)?({expression})$", module))
    return next(found, default)


def parse_tensor_name(name: str) -> tuple[str, TensorKind]:
    """Return the module of a tensor, named as in the base model's checkpoint without ".weight", and the tensor's kind.

    "down" and "up" are a module's A and B, "weight" replaces its own. Those of a lookup are "embedding_down" [r, V] and
    "embedding_up" [D, r]: r = rank, V = vocabulary, D = hidden size. A "base_weight" is the base model's, which PEFT
    saves next to adapters of embeddings and logits heads. Raises AdapterError.
    """
    for part, why in _REFUSED_TENSORS.items():
        if part in name:
            raise AdapterError(f"tensor {name!r}: {why}")
    found = _TENSOR_NAME.fullmatch(name)
    if found is None:
        raise AdapterError(f"tensor {name!r} is not the weight of an adapter")
    if (lora := found["lora"]) is not None:
        return found["module"], _KINDS[lora]
    return found["module"], "base_weight" if found["base"] else "weight"


def weights_file(folder: Path) -> Path:
    """Return the file with the adapter's tensors. Raises AdapterError if there is none."""
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    raise AdapterError(f"{folder}: none of {', '.join(WEIGHTS_FILES)}; is it the folder of an adapter?")


def content_hash(folder: Path) -> str:
    """Return the SHA-256 of the adapter's settings and weights: equal for copies under any name."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, weights_file(folder)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


class AdapterFiles:
    """Reads and hashes adapters; what has not changed is not read again. Callable from any thread."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._known: OrderedDict[Path, tuple[_Version, AdapterRef]] = OrderedDict()  # most recently used last
        self._folders: dict[str, Path] = {}  # by name, where that is no path
        self._lock = threading.Lock()

    def read(self, request: LoRARequest) -> AdapterRef:
        """Return the adapter of a request. Takes as long as reading its files once. Raises UserError."""
        try:
            folder = self._folder(request.path)
            paths = [path for path in (folder / CONFIG_FILE, weights_file(folder)) if path.exists()]
            version = tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, paths))
        except (OSError, ValueError) as error:  # no path at all: too long, or with a null
            raise AdapterError(f"{request.path[:200]!r} cannot be read: {str(error)[:200]}") from error
        with self._lock:
            known = self._known.get(folder)
        if known is None or known[0] != version:
            rank, limit = read_adapter_config(folder).largest_rank, self._config.max_lora_rank
            if rank > limit:
                limit_text = f"rank {rank} exceeds max_lora_rank={limit} of this engine"
                raise InvalidParameterError("lora_request", request.name, limit_text)
            ref = AdapterRef(name=request.name, path=str(folder), content_hash=content_hash(folder), rank=rank)
            known = version, ref
        with self._lock:
            self._known[folder] = known
            self._known.move_to_end(folder)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return msgspec.structs.replace(known[1], name=request.name)

    def _folder(self, path: str) -> Path:
        """Return where an adapter is; one of the Hub is looked up once."""
        if (known := self._folders.get(path)) is not None:
            return known
        folder = resolve_adapter(path).absolute()
        if folder != Path(path).absolute():
            self._folders[path] = folder
        return folder
