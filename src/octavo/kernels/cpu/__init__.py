"""Kernels for CPUs in C++, one shared object for all ISA levels: `_cpu`, built where a compiler was at hand."""
