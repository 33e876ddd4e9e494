"""The bundled demo model: a small Qwen3 chat checkpoint as package data, so that a first run needs no network.

Made by `tools/demo_model`; what it can do, and how well, is in the README.md beside this file.
"""

from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """The checkpoint folder: configuration, weights and tokenizer, as `LLM(model_name=...)` takes any folder."""
    return Path(__file__).resolve().parent
