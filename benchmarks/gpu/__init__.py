"""A GPU, its kernels and the engine on it, in one command."""
