"""Kernels for CPUs in C++, one shared object for all ISA levels: `_cpu`, built if a compiler is available."""
