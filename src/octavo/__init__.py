"""Octavo: an LLM inference and serving engine.

    from octavo import LLM, SamplingParams
    LLM("demo").generate("Hello, world!", SamplingParams(max_tokens=32))

Names are loaded when they are first used, so `import octavo` costs milliseconds and does not import torch.
"""

from octavo._version import __version__
from octavo.working_folder import leave_working_folder

TYPE_CHECKING = False  # what `typing` calls so: until the call below, even that could be a file of the user's

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM as AsyncLLM
    from octavo.device.manager import DeviceManager as DeviceManager
    from octavo.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from octavo.engine.llm_engine import LLMEngine as LLMEngine
    from octavo.llm import LLM as LLM
    from octavo.lora_request import LoRARequest as LoRARequest
    from octavo.model_runner import ModelRunner as ModelRunner
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.sampling_params import PoolingParams as PoolingParams
    from octavo.sampling_params import RequestPriority as RequestPriority
    from octavo.sampling_params import SamplingParams as SamplingParams
    from octavo.structured_output import Reasoning as Reasoning
    from octavo.structured_output import StructuralTag as StructuralTag
    from octavo.structured_output import StructuredOutput as StructuredOutput

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
__all__ = ["__version__", *(name for names in _MODULES.values() for name in names)]  # noqa: PLE0604 - they are strings

leave_working_folder()


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
