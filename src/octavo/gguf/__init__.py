"""GGUF, llama.cpp's format: a whole model in one file. Read here without torch; specification: ggml's docs/gguf.md."""
