"""Octavo: an LLM inference and serving engine.

    from octavo import LLM, SamplingParams
    LLM("demo").generate("Hello, world!", SamplingParams(max_tokens=32))

Names are loaded when they are first used, so `import octavo` costs milliseconds and does not import torch.
"""

from octavo._version import __version__
from octavo.working_folder import leave_working_folder

TYPE_CHECKING = False  # what `typing` calls so: until the call below, even that could be a file of the user's

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.device.manager import DeviceManager
    from octavo.engine.async_llm_engine import AsyncLLMEngine
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.model_runner import ModelRunner
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import PoolingParams, RequestPriority, SamplingParams
    from octavo.structured_output import Reasoning, StructuralTag, StructuredOutput

_MODULES = {
    "octavo.llm": ("LLM",),
    "octavo.async_llm": ("AsyncLLM",),
    "octavo.engine.llm_engine": ("LLMEngine",),
    "octavo.engine.async_llm_engine": ("AsyncLLMEngine",),
    "octavo.lora_request": ("LoRARequest",),
    "octavo.model_runner": ("ModelRunner",),
    "octavo.device.manager": ("DeviceManager",),
    "octavo.sampling_params": ("SamplingParams", "PoolingParams", "RequestPriority"),
    "octavo.structured_output": ("StructuredOutput", "Reasoning", "StructuralTag"),
    "octavo.outputs": ("RequestOutput", "CompletionOutput"),
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "DeviceManager",
    "LLMEngine",
    "LoRARequest",
    "ModelRunner",
    "PoolingParams",
    "Reasoning",
    "RequestOutput",
    "RequestPriority",
    "SamplingParams",
    "StructuralTag",
    "StructuredOutput",
    "__version__",
]

leave_working_folder()


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
