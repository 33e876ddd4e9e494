"""Selects the loader of a weight format from a registry, so that only the selected one is imported."""

from importlib import import_module

from octavo.config.engine import LoadConfig
from octavo.errors import InvalidParameterError
from octavo.loader.base import ModelLoader

# load_format -> module and class
_LOADERS = {
    "auto": ("octavo.loader.auto", "AutoLoader"),
    "safetensors": ("octavo.loader.safetensors", "SafetensorsLoader"),
    "pt": ("octavo.loader.torch_pt", "TorchLoader"),
    "gguf": ("octavo.loader.gguf", "GgufLoader"),
    "tensorizer": ("octavo.loader.tensorized", "TensorizerLoader"),
    "sharded_state": ("octavo.loader.sharded_state", "ShardedStateLoader"),
    "dummy": ("octavo.loader.dummy", "DummyLoader"),
}


def get_model_loader(load_config: LoadConfig) -> ModelLoader:
    """Return the loader of `load_config.load_format`.

    Raises:
        InvalidParameterError: an unknown format.
    """
    name = load_config.load_format
    if name not in _LOADERS:
        raise InvalidParameterError("load_format", name, "unknown; one of " + ", ".join(_LOADERS))
    module, class_name = _LOADERS[name]
    loader: ModelLoader = getattr(import_module(module), class_name)(load_config)
    return loader
