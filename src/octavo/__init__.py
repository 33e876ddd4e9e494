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

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "AsyncLLMEngine": "octavo.engine.async_llm_engine",
    "LoRARequest": "octavo.lora_request",
    "ModelRunner": "octavo.model_runner",
    "DeviceManager": "octavo.device.manager",
    "SamplingParams": "octavo.sampling_params",
    "PoolingParams": "octavo.sampling_params",
    "RequestPriority": "octavo.sampling_params",
    "StructuredOutput": "octavo.structured_output",
    "Reasoning": "octavo.structured_output",
    "StructuralTag": "octavo.structured_output",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
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

    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
