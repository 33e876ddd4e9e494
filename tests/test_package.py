"""The package as a whole: what an import costs, and that version and public names are where they are said to be.

Cost is counted in modules, not in milliseconds: a test that measures time fails on a busy machine.
"""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import grimp
import pytest

import octavo

# Each of them costs hundreds of milliseconds or pulls in a framework. None may come with the control side.
FRAMEWORKS = {"torch", "transformers", "tensorflow", "jax", "triton", "scipy", "pandas"}
# `import octavo` alone needs only the standard library.
HEAVY = FRAMEWORKS | {
    "numpy",
    "msgspec",
    "zmq",
    "tokenizers",
    "safetensors",
    "jinja2",
    "huggingface_hub",
    "rich",
    "typer",
}

CONTROL_SIDE = [
    "octavo.async_llm",
    "octavo.cli.bench",
    "octavo.cli.chat",
    "octavo.cli.generate",
    "octavo.cli.main",
    "octavo.config.args",
    "octavo.contracts.engine",
    "octavo.contracts.schedule",
    "octavo.engine.core",
    "octavo.engine.core_client",
    "octavo.engine.llm_engine",
    "octavo.engine.process_client",
    "octavo.errors",
    "octavo.executor.base",
    "octavo.llm",
    "octavo.config.hub",
    "octavo.scheduler.scheduler",
    "octavo.tokenizer.tokenizer",
]


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `statement`."""
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_octavo_loads_nothing_heavy() -> None:
    assert modules_after("import octavo") & HEAVY == set()


def test_control_side_does_not_load_torch() -> None:
    if modules_after("import " + ", ".join(CONTROL_SIDE)) & FRAMEWORKS:
        guilty = {module: modules_after(f"import {module}") & FRAMEWORKS for module in CONTROL_SIDE}
        pytest.fail(str({module: loaded for module, loaded in guilty.items() if loaded}))


def test_the_probe_sees_what_is_loaded() -> None:
    """The two tests above would pass for ever if the probe were blind."""
    assert "numpy" in modules_after("import octavo.contracts.schedule")


def test_version_is_the_one_that_was_installed() -> None:
    assert octavo.__version__ == version("octavo")


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(octavo, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'octavo' has no attribute 'Engine'"):
        importlib.import_module("octavo").Engine  # noqa: B018


def import_circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the circles of a graph of imports, as `a -> b -> a`. Changes the graph."""
    circles = []
    while True:
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            backward = error.args[1]  # each module is imported by the next
            circles.append(" -> ".join(reversed(backward)))
            imports[backward[1]].discard(backward[0])
        else:
            return circles


def modules_named_in(module: str, known: set[str]) -> set[str]:
    """Return the modules that registries in `module` name: imported on demand, by `importlib.import_module`."""
    path = Path(*octavo.__path__, *module.split(".")[1:]).with_suffix(".py")
    if module == "octavo" or not path.is_file():  # a package's own file: `octavo` exports its names lazily
        return set()
    constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return {value for value in constants if isinstance(value, str) and "." in value} & known


def test_no_imports_go_round_in_a_circle() -> None:
    """Imports inside functions and registries count: they say what knows what, as those at the top of a file do."""
    graph = grimp.build_graph("octavo", exclude_type_checking_imports=True, cache_dir=None)
    imports = {
        module: graph.find_modules_directly_imported_by(module) | modules_named_in(module, graph.modules)
        for module in graph.modules
    }
    assert len(imports) > 100
    assert imports["octavo.loader.registry"] >= {"octavo.loader.base", "octavo.loader.gguf"}
    assert import_circles(imports) == []


def test_the_search_for_circles_finds_them() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e", "d"}}
    assert sorted(map(len, map(str.split, import_circles(imports)))) == [5, 7]


def test_kernels_are_compiled_alike_for_every_python() -> None:
    """What `make wheel` relies on, with ccache: one file alone reads headers of Python."""
    folder = Path(octavo.__file__).parent / "kernels/cpu"
    headers = {path.name for path in folder.glob("*.h") if re.search(r"<(nanobind/|Python\.h)", path.read_text())}
    includes = {path.name: {*re.findall(r'#include [<"]([^">]+)', path.read_text())} for path in folder.glob("*.*")}
    assert {"nanobind/nanobind.h"} <= {*includes["kernels.h"]}
    for _ in includes:
        headers |= {name for name, of in includes.items() if name.endswith(".h") and headers & of}
    assert [name for name, of in includes.items() if name.endswith(".cpp") and headers & of] == ["module.cpp"]
