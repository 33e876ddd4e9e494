"""The bundled demo models as package data, so that a first run needs no network.

`demo` is a small Qwen3 chat checkpoint, in this folder; `demo-vl`, in `vl/`, is a small Qwen2.5-VL one that answers
questions about pictures of colored shapes or a number. Built by `tools/demo_model`; the README.md in each folder
describes what it can do and how well.
"""

from pathlib import Path

__all__ = ["demo_adapter_path", "demo_model_path", "demo_vl_model_path"]


def demo_model_path() -> Path:
    """Return the checkpoint folder (config, weights, tokenizer), for `LLM(model_name=...)`."""
    return Path(__file__).resolve().parent


def demo_adapter_path() -> Path:
    """Return the folder of a LoRA adapter for the demo model: it answers in JSON."""
    return demo_model_path() / "adapters" / "json"


def demo_vl_model_path() -> Path:
    """Return the checkpoint folder of the vision-language model."""
    return demo_model_path() / "vl"
