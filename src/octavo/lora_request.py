"""`LoRARequest`: the LoRA adapter that a request uses."""

import os
from dataclasses import dataclass

from octavo.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A PEFT adapter by name and folder. The constructor is that of vLLM.

    Adapters with the same contents are the same adapter to the engine, whatever their names, ids and folders. Raises
    InvalidParameterError: names the field, its value and the limit.
    """

    lora_name: str
    lora_int_id: int  # at least 1; not used by Octavo, which knows an adapter by its contents
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        name: object = self.lora_name
        path: object = self.lora_path
        if not isinstance(name, str) or not name:
            raise InvalidParameterError("lora_name", name, "a non-empty string")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidParameterError("lora_int_id", self.lora_int_id, "an integer of at least 1")
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise InvalidParameterError("lora_path", path, "the folder of a PEFT adapter, a Hub id, or `demo-json`")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)
