"""Octavo's own GPU kernels, in Triton: one op per file, a kernel with its launcher. Imported if there is a GPU.

They also run on a CPU under Triton's interpreter, for tests: `TRITON_INTERPRET=1` and `OCTAVO_GPU_KERNELS=triton`.
"""
