"""Compares base-model weights that PEFT saved next to an adapter with those of the model that is served."""

import torch

from octavo.config.engine import LoadConfig
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.models.weights import renamed, spelt_as_in_table

_VOCABULARY = ("embedding", "logits_head")


class BaseWeights:
    """The checkpoint of a model, read once more when an adapter's file asks for a comparison."""

    def __init__(self, model: CausalLM, load: LoadConfig) -> None:
        self._model, self._load = model, load

    def has(self, module: str, saved: torch.Tensor) -> bool:
        """Return whether the checkpoint's weight of an embedding or logits head equals `saved` in the model's dtype."""
        names = {f"{renamed(self._model, module)}.weight"}
        if self._model.config.tie_word_embeddings:
            names |= {f"{name}.weight" for name, of in self._model.weight_names.items() if of in _VOCABULARY}
        dtype = self._model.context.dtype
        for name, tensor in spelt_as_in_table(self._model, get_model_loader(self._load).tensors(self._model)):
            if name in names:
                return tensor.shape == saved.shape and torch.equal(tensor.to(dtype), saved.to(dtype))
        return False
