"""How a checkpoint makes one vector of a prompt, or ranks pairs of texts: `modules.json` and the folders it names.

sentence-transformers writes these files, in two generations: the older has booleans for each way of pooling, the newer
one a name. The last part of a module's type is the same in both.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from octavo.config.json_fields import JsonFields
from octavo.config.model import DenseStep, PoolerName, PoolingConfig, PoolingKind
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

MODULES_FILE = "modules.json"
GGUF_POOLING, GGUF_DENSE = "pooling_type", "pooled_linears"  # of the settings that a GGUF file stands for
_GGUF_KINDS: MappingProxyType[int, PoolingKind | None] = MappingProxyType({0: None, 1: "mean", 2: "cls", 3: "last"})
_RANKS = 4
_KINDS: MappingProxyType[str, PoolingKind] = MappingProxyType({"cls": "cls", "mean": "mean", "lasttoken": "last"})
_FLAGS = MappingProxyType(
    {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
)
_OTHER_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_ACTIVATIONS: MappingProxyType[str, Literal["none", "tanh"]] = MappingProxyType({"Identity": "none", "Tanh": "tanh"})


def read_pooling(folder: Path) -> PoolingConfig | None:
    """Return what a folder's files say; None: nothing.

    Raises CheckpointError: a malformed file. UnsupportedModelError: a module that would change the result.
    """
    if not (folder / MODULES_FILE).is_file():
        return None
    config = PoolingConfig(normalizes=False)
    for index, module in enumerate(JsonFields.read_list(folder / MODULES_FILE)):
        kind, path = module.text("type").rpartition(".")[2], module.text("path", "")
        if index:
            config = _after(module, kind, folder, config)
        elif kind != "Transformer" or path:
            raise module.unsupported("type", f" as the first module, at {path!r}; known: Transformer, at ''")
    for step, follower in pairwise(config.dense):
        if step.out_size != follower.in_size:
            raise CheckpointError(
                f"{folder / follower.folder}: in_features={follower.in_size}: {step.out_size} is expected"
            )
    return replace(config, prompt=_default_prompt(folder))


def _after(module: JsonFields, kind: str, folder: Path, config: PoolingConfig) -> PoolingConfig:
    """Return what is known behind one more module."""
    if config.normalizes:
        raise module.unsupported("type", "; no module is known behind Normalize")
    path = module.text("path", "")
    if kind == "Pooling":
        return replace(config, kind=_read_kind(JsonFields.read(folder / path / "config.json")))
    if kind == "Dense":
        return replace(config, dense=(*config.dense, _read_dense(JsonFields.read(folder / path / "config.json"), path)))
    if kind == "Normalize":
        return replace(config, normalizes=True)
    if kind == "LogitScore":
        return replace(config, ranks=True, label_token_ids=_read_labels(folder, path))
    raise module.unsupported("type", "; known: Transformer, Pooling, Dense, Normalize, LogitScore")


def _read_kind(fields: JsonFields) -> PoolingKind:
    if not fields.flag("include_prompt", True):
        raise fields.unsupported("include_prompt")
    if "pooling_mode" in fields:
        name = fields.text("pooling_mode")
        if name not in _KINDS:
            raise fields.unsupported("pooling_mode", f"; known: {', '.join(_KINDS)}")
        return _KINDS[name]
    for flag in _OTHER_FLAGS:
        if fields.flag(flag, False):
            raise fields.unsupported(flag, f"; known: {', '.join(_FLAGS)}")
    wanted = [name for flag, name in _FLAGS.items() if fields.flag(flag, False)]
    if len(wanted) != 1:
        raise CheckpointError(f"{fields.origin}: one of {', '.join(_FLAGS)} is expected to be true")
    return _KINDS[wanted[0]]


def _read_dense(fields: JsonFields, folder: str) -> DenseStep:
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise fields.unsupported("activation_function", f"; known: {', '.join(_ACTIVATIONS)}")
    if Path(folder).name != folder:
        raise CheckpointError(f"{fields.origin}: the name of a folder beside {MODULES_FILE} is expected")
    return DenseStep(
        name=f"{folder}.linear",
        folder=folder,
        in_size=fields.integer("in_features"),
        out_size=fields.integer("out_features"),
        has_bias=fields.flag("bias", True),
        activation=_ACTIVATIONS[name],
    )


def _read_labels(folder: Path, path: str) -> tuple[int, int]:
    fields = JsonFields.read(folder / path / "config.json")
    return fields.integer("true_token_id", minimum=0), fields.integer("false_token_id", minimum=0)


def _default_prompt(folder: Path) -> str:
    """Return what is put before each text unless somebody says otherwise."""
    file = folder / "config_sentence_transformers.json"
    if not file.is_file():
        return ""
    fields = JsonFields.read(file)
    name = fields.text("default_prompt_name", "")
    return fields.nested("prompts").text(name) if name else ""


def gguf_pooling(fields: JsonFields) -> PoolingConfig | None:
    """Return what a GGUF file says; None: nothing. Raises UnsupportedModelError: an unknown kind."""
    if GGUF_POOLING not in fields:
        return None
    number = fields.integer(GGUF_POOLING, minimum=0)
    if number == _RANKS:
        return PoolingConfig(ranks=True)
    if number not in _GGUF_KINDS:
        raise fields.unsupported(GGUF_POOLING, "; known: 0 to 4")
    kind, shapes = _GGUF_KINDS[number], fields.nested(GGUF_DENSE)
    dense = []
    for name in sorted(shapes.values):
        out_size, in_size = shapes.integers(name)
        dense.append(DenseStep(name=name, in_size=in_size, out_size=out_size, has_bias=False))
    return None if kind is None else PoolingConfig(kind=kind, dense=tuple(dense))


def resolve_pooling(
    found: PoolingConfig | None, pooler: PoolerName, dimensions: tuple[int, ...] | None, hidden_size: int
) -> PoolingConfig | None:
    """Return what an engine does, given the files' own, the option, and the sizes that a vector may be cut to.

    Raises InvalidParameterError: the option does not fit the files. UnsupportedModelError: nor do linears the model.
    """
    if found is not None and found.dense and found.dense[0].in_size != hidden_size:
        why = f"in_features={found.dense[0].in_size}: the model's hidden size is {hidden_size}"
        raise UnsupportedModelError(f"{found.dense[0].folder}: {why}")
    if pooler != "auto" and found is not None and found.num_scores:
        limit = "auto: this checkpoint has a classifier, which says what it reads"
        raise InvalidParameterError("pooler", pooler, limit)
    if pooler == "rerank":
        return replace(found or PoolingConfig(), ranks=True)
    if pooler != "auto":
        return replace(found or PoolingConfig(), kind=pooler, dimensions=dimensions)
    return None if found is None else replace(found, dimensions=dimensions)


def trained_dimensions(fields: JsonFields, defaults: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the sizes that a model's vectors may be cut to: (): any; None: the model is not trained for it.

    By vLLM's keys in `config.json`, else `defaults`, what is known of the family.
    """
    if "matryoshka_dimensions" in fields:
        return tuple(fields.integers("matryoshka_dimensions"))
    return () if fields.flag("is_matryoshka", False) else defaults
