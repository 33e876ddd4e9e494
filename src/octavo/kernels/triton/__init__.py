"""Octavo's own kernels for GPUs, in Triton: one op a file, a kernel with its launcher. Imported when a GPU is there.

They also run on a CPU under Triton's interpreter, for tests: `TRITON_INTERPRET=1` and `OCTAVO_GPU_KERNELS=triton`.
"""
