"""Names of tensors in PEFT's files: the module of the base model that each belongs to, and its role."""

import re
from dataclasses import dataclass
from typing import Literal

from octavo.errors import AdapterError

TensorKind = Literal["down", "up", "embedding_down", "embedding_up", "weight", "base_weight"]

# "base_model.model." is PEFT's; what follows a "lora_A" may be the name of the adapter in a raw state dict.
_NAME = re.compile(
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
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported",
    "trainable_tokens_": "single trained rows of the embedding are not supported",
    ".bias": "trained biases are not supported",
}


@dataclass(frozen=True, slots=True)
class AdapterTensorName:
    """A tensor of an adapter: "down" and "up" are its A and B, "weight" replaces the module's own.

    Those of a lookup are "embedding_down" [r, V] and "embedding_up" [D, r]: r = rank, V = vocabulary, D = hidden size.
    A "base_weight" is the base model's, which PEFT saves next to adapters of embeddings and logits heads.
    """

    module: str  # in the base model's checkpoint, without ".weight"
    kind: TensorKind

    @classmethod
    def of(cls, name: str) -> "AdapterTensorName":
        """Parse a name in an adapter's file.

        Raises:
            AdapterError: it belongs to no kind of adapter that is supported.
        """
        for part, why in _REFUSED.items():
            if part in name:
                raise AdapterError(f"tensor {name!r}: {why}")
        found = _NAME.fullmatch(name)
        if found is None:
            raise AdapterError(f"tensor {name!r} is not the weight of an adapter")
        if (lora := found["lora"]) is not None:
            return cls(found["module"], _KINDS[lora])
        return cls(found["module"], "base_weight" if found["base"] else "weight")
