"""`LoRARequest`: the LoRA adapter that a request uses."""

import os
from dataclasses import dataclass

from octavo.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A PEFT adapter by name and folder. The constructor is that of vLLM.

    Adapters with the same contents are one to the engine, whatever their names, ids and folders.

    Raises:
        InvalidParameterError: names the field, its value and the limit.
    """

    lora_name: str
    lora_int_id: int  # at least 1; not used by Octavo, which knows an adapter by its contents
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameterError("lora_name", self.lora_name, "a non-empty string")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidParameterError("lora_int_id", self.lora_int_id, "an integer of at least 1")
        if not isinstance(self.lora_path, (str, os.PathLike)) or not os.fspath(self.lora_path):
            raise InvalidParameterError("lora_path", self.lora_path, "the folder of a PEFT adapter")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)
