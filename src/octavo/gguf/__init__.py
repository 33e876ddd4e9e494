"""GGUF, llama.cpp's single-file model format. This reader needs no torch; specification: ggml's docs/gguf.md.

A damaged file is a `CheckpointError`, one of another version or with other types an `UnsupportedModelError`.
"""
