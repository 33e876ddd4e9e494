"""Compile every kernel for GPUs that are not here: `python -m tests.kernels.triton.ahead_of_time 90` (for sm_90).

`--quick` brings only the first variant of each kernel down to machine code, and of the others checks what Triton makes
of their source: types, layouts, pipelining. That takes a fifth of the time, most of which is LLVM's and ptxas's
(`make ahead-of-time` runs it).

Triton brings the whole compiler down to machine code with it. So launchers are called as ever, with tensors of a CPU,
and in place of each launch the kernel is compiled, for exactly these arguments. What is wrong with types, shapes or
layouts raises here, and registers that do not suffice are counted. Prints a line for each kernel.

A process of its own: Triton interprets kernels or compiles them, and settles that when it is imported.
"""

import argparse
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

# Modules with a function `launch_all(capability)`, which calls every launcher once for each of its variants.
CASES = [f"tests.kernels.triton.{name}launches" for name in ("", "more_", "low_bit_")]
_WARP_SIZE = 32


class Compiler:
    """Takes the place of launches."""

    def __init__(self, capability: int, *, is_quick: bool = False) -> None:
        self._target = GPUTarget("cuda", capability, _WARP_SIZE)
        self._backend = make_backend(self._target)
        self._is_quick = is_quick
        self.done: set[str] = set()
        self.compiled: set[str] = set()  # names of kernels

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
        if key not in self.done:
            self.done.add(key)
            source = ASTSource(kernel, signature, constants, attributes)
            if self._is_quick and kernel.__name__ in self.compiled:
                self._check(source, options)
                return
            self.compiled.add(kernel.__name__)
            compiled = triton.compile(source, target=self._target, options=options.__dict__)
            print(f"{kernel.__name__}: {_describe(compiled)}", flush=True)

    def _check(self, source: ASTSource, options: Any) -> None:
        """Run the first stages of a compilation: what they do not refuse is lowered, whatever it is."""
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        stages: dict[str, Any] = {}
        self._backend.add_stages(stages, options, source.language)
        codegen = self._backend.get_codegen_implementation(options)
        module = source.make_ir(self._target, options, codegen, self._backend.get_module_map(), context)
        metadata = {"target": self._target, **options.__dict__}
        for stage in ("ttir", "ttgir"):
            module = stages[stage](module, metadata)


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
    parser = argparse.ArgumentParser(description="Compile every kernel for a GPU that is not here.")
    parser.add_argument("capability", type=int, help="80, 90, ...")
    parser.add_argument("--quick", action="store_true", help="machine code for the first variant of each kernel only")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.capability, is_quick=arguments.quick)
    compiler.install()
    for module in CASES:
        import_module(module).launch_all(arguments.capability)
    print(f"{len(compiler.done)} variants of {len(compiler.compiled)} kernels")
    assert compiler.done, "no launch was seen"


if __name__ == "__main__":
    main()
