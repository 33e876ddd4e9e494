"""The bundled demo model: a small Qwen3 chat checkpoint as package data, so that a first run needs no network.

Built by `tools/demo_model`; the README.md in this folder describes what it can do and how well.
"""

from pathlib import Path

__all__ = ["demo_adapter_path", "demo_model_path"]


def demo_model_path() -> Path:
    """Return the checkpoint folder (config, weights, tokenizer), for `LLM(model_name=...)`."""
    return Path(__file__).resolve().parent


def demo_adapter_path() -> Path:
    """Return the folder of a LoRA adapter for the demo model: it answers in JSON."""
    return demo_model_path() / "adapters" / "json"
