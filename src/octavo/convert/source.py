"""`Checkpoint`: what a conversion reads from a model and writes as another format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from octavo.config import families
from octavo.config.engine import LoadConfig, LoadFormat
from octavo.config.gguf import read_gguf_fields
from octavo.config.hf import read_config_fields, read_model_config
from octavo.config.hf_quantization import GGUF_TYPES, read_quantization
from octavo.config.hub import resolve_model
from octavo.config.json_fields import JsonFields
from octavo.config.model import ModelConfig
from octavo.convert.rope_factors import with_llama3_settings
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.loader.registry import get_model_loader
from octavo.worker.memory import empty_model

_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
SINGLE_FILES = MappingProxyType({"gguf": "model.gguf"})  # formats that are a file instead of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """What the writer of a format takes. Raises InvalidParameterError: a value out of range."""

    max_shard_bytes: int | None = None  # of weights in one file, which a conversion holds in memory; None: 2 GiB
    tensor_parallel_size: int | None = None  # ranks that a sharded state is for; None: 1
    gguf_type: str | None = None  # of matrices in a GGUF file, such as Q8_0; None: the dtype that they have

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameterError(name, value, "at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model on its way from one format to another."""

    path: Path  # folder or file that it is read from
    model: ModelConfig
    settings: Mapping[str, Any]  # contents of config.json
    load_format: LoadFormat = "auto"
    dtype: torch.dtype | None = None  # of floating-point tensors; None: as they are in the source

    @classmethod
    def open(
        cls, name: str, path: Path | None = None, *, load_format: LoadFormat = "auto", dtype: str = "auto"
    ) -> "Checkpoint":
        """Read a model's settings. `path` is where it is; None: it is looked for by its name.

        `dtype` "auto": tensors stay as they are; dequantized ones of a GGUF file are in the dtype that Octavo computes
        the file in.
        """
        path = path or resolve_model(name)
        model = read_model_config(path, model=name, dtype=dtype)
        if model.encoder is not None:
            raise UnsupportedModelError(f"{path}: encoders are not converted; --quantization quantizes one at load")
        if path.is_file():
            facts = families.FAMILIES[model.architecture].gguf
            if facts is not None and not facts.is_converted:
                why = f"checkpoints of {model.architecture} hold the weights in another layout"
                raise UnsupportedModelError(f"{path}: a GGUF file of this architecture cannot be converted: {why}")
            model = replace(model, quantization=None)  # its blocks are dequantized
        elif dtype != "auto" and model.quantization is not None:
            method = model.quantization.method
            limit = f"auto: the weights are quantized (quant_method {method}) and are written as they are"
            raise InvalidParameterError("dtype", dtype, limit)
        is_cast = path.is_file() or dtype != "auto"
        return cls(
            path=path,
            model=model,
            settings=_settings(path, model, is_cast=is_cast),
            load_format=load_format,
            dtype=getattr(torch, model.dtype) if is_cast else None,
        )

    @property
    def written_model(self) -> ModelConfig:
        """The model that is written: its weights may be quantized, although those of the source are not."""
        quantization = read_quantization(JsonFields(str(self.path), self.settings), self.model.dtype)
        return replace(self.model, quantization=quantization)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every tensor, under the names of Hugging Face checkpoints, one at a time."""
        loader = get_model_loader(LoadConfig(load_format=self.load_format, seed=0))
        for name, tensor in loader.tensors(empty_model(self.model)):
            is_cast = self.dtype is not None and tensor.dtype in _FLOATS
            yield name, tensor.to(self.dtype) if is_cast else tensor


def _settings(path: Path, model: ModelConfig, *, is_cast: bool) -> dict[str, Any]:
    """Return config.json's contents: the folder's own, or those that a GGUF file's metadata stands for."""
    if path.is_file():
        settings = {key: value for key, value in read_gguf_fields(path).values.items() if key != GGUF_TYPES}
        settings = with_llama3_settings(settings, str(path))
        if model.architecture == "MixtralForCausalLM":
            settings["num_local_experts"] = settings.pop("num_experts")
        settings = {"model_type": families.FAMILIES[model.architecture].model_type, **settings}  # for transformers
    else:
        own = read_config_fields(path)
        settings = {**own.values, **dict.fromkeys(own.nulls)}
    if is_cast:
        settings.pop("torch_dtype", None)
        settings["dtype"] = model.dtype
    if not model.tie_word_embeddings:
        is_default = families.FAMILIES[model.architecture].defaults.get("tie_word_embeddings", False)
        settings = _untied(settings, is_default=is_default)
    return settings


def _untied(settings: dict[str, Any], *, is_default: bool) -> dict[str, Any]:
    """Let the settings say that the head is not the embedding, wherever they say that it is."""
    key, nested = "tie_word_embeddings", settings.get("text_config")
    if nested is not None:
        settings = settings | {"text_config": _untied(nested, is_default=False)}
    return settings | {key: False} if settings.get(key, is_default) else settings


def import_library(module: str, to: str) -> Any:
    """Import a module of the library that writes a format, which has its name."""
    try:
        return import_module(module)
    except ImportError as error:
        limit = f"needs the package {to}: python -m pip install 'octavo[{to}]'"
        raise InvalidParameterError("to", to, limit) from error
