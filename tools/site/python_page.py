"""The page of the Python API: what `octavo` exports, from its docstrings."""

import octavo

_INTRODUCTION = """# Python

What `import octavo` offers, from the docstrings. Everything else may change without notice.
"""
# In the order in which a reader meets them.
_SECTIONS = {
    "Engines": ("LLM", "AsyncLLM", "LLMEngine", "AsyncLLMEngine", "ModelRunner"),
    "Parameters": ("SamplingParams", "PoolingParams", "StructuredOutput", "Reasoning", "StructuralTag", "LoRARequest",
                   "RequestPriority"),
    "Results": ("RequestOutput", "CompletionOutput"),
    "Devices": ("DeviceManager",),
}  # fmt: skip


def python_page() -> str:
    """Return the page's Markdown, for mkdocstrings. Raises ValueError: a public name has no section."""
    known = {name for names in _SECTIONS.values() for name in names}
    if missing := sorted({*octavo.__all__} - known - {"__version__"}):
        raise ValueError(f"tools/site/python_page.py: no section for {', '.join(missing)}")
    modules = {name: module for module, names in octavo._MODULES.items() for name in names}
    parts = [_INTRODUCTION]
    for title, names in _SECTIONS.items():
        parts.append(f"\n## {title}\n")
        parts += [f"\n::: {modules[name]}.{name}\n    options:\n      heading_level: 3\n" for name in names]
    return "".join(parts)
