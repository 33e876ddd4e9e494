"""Compile every kernel for GPUs that are not here: `python -m tests.kernels.triton.ahead_of_time 90` (for sm_90).

Triton brings the whole compiler down to machine code with it. So launchers are called as ever, with tensors of a CPU,
and in place of each launch the kernel is compiled, for exactly these arguments. What is wrong with types, shapes or
layouts raises here, and registers that do not suffice are counted. Prints a line for each kernel.

A process of its own: Triton interprets kernels or compiles them, and settles that when it is imported.
"""

import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

# Modules with a function `launch_all(capability)`, which calls every launcher once for each of its variants.
CASES = [f"tests.kernels.triton.{name}launches" for name in ("", "more_", "low_bit_")]
_WARP_SIZE = 32


class Compiler:
    """Takes the place of launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP_SIZE)
        self._backend = make_backend(self._target)
        self._done: set[str] = set()

    def install(self) -> None:
        """From here on no kernel runs in this process."""
        compiler = self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiler.compile(kernel, args, kwargs)

        jit.JITFunction.run = run

    def compile(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile a kernel as a launch with these arguments would."""
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(
            self._backend, kwargs, bound, specialization, options
        )
        key = f"{kernel.__name__} {signature} {constants} {attributes} {options}"
        if key not in self._done:
            self._done.add(key)
            source = ASTSource(kernel, signature, constants, attributes)
            compiled = triton.compile(source, target=self._target, options=options.__dict__)
            print(f"{kernel.__name__}: {_describe(compiled)}", flush=True)


def _describe(compiled: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [registers], [stack] = (re.findall(rf"{word}:(\d+)", usage) for word in ("REG", "STACK"))
    products = (
        "wgmma" if "wgmma.mma_async" in compiled.asm["ptx"] else "mma" if "mma.sync" in compiled.asm["ptx"] else "none"
    )
    return f"{registers} registers, {stack} bytes of stack, {compiled.metadata.shared} of shared memory, {products}"


def main() -> None:
    capability = int(sys.argv[1])
    Compiler(capability).install()
    for module in CASES:
        import_module(module).launch_all(capability)


if __name__ == "__main__":
    main()
