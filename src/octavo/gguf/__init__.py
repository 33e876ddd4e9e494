"""GGUF, llama.cpp's single-file model format. This reader needs no torch; specification: ggml's docs/gguf.md."""
