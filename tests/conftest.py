"""What every test shares: one thread, quiet libraries, and which tests a run leaves out."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from tests.breadth import RUNS_ALL, pick
from tests.order import place, unit

# Before any test imports a library that reads them. Child processes inherit them. One thread: matrices in tests are
# tiny, and where other programs want the cores too, waiting for a second one made the suite six times slower. Tests
# that are about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # no spinning on cores that another process of tests could use
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# What engines keep on disk is this run's own, and not there for the next one.
if "OCTAVO_CACHE" not in os.environ:
    os.environ["OCTAVO_CACHE"] = tempfile.mkdtemp(prefix="octavo-tests-")
    atexit.register(shutil.rmtree, os.environ["OCTAVO_CACHE"], ignore_errors=True)

# Kernels for GPUs run on the CPU where there is no GPU. Triton reads this once, when it is imported.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A job started in the background ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test measures time: a busy machine must not fail one. The same examples each run: a failure can be repeated.
settings.register_profile("octavo", deadline=None, derandomize=True, max_examples=pick(30, 400))
settings.load_profile("octavo")
# It would also try constants of all that has been imported of Octavo: seconds, and other examples in each process.
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """Let processes tell only of calls and of what went wrong: half of what a short test takes is messages."""
    if not hasattr(config, "workerinput") or config.getoption("durations") or config.getoption("xmlpath"):
        return
    [interactor] = [each for each in config.pluginmanager.get_plugins() if hasattr(each, "sendevent")]
    send = interactor.sendevent

    def send_some(name: str, **message: Any) -> None:
        report = message.get("data", {}) if name == "testreport" else {}
        is_news = report.get("when") in {None, "call"} or report["outcome"] != "passed" or report["sections"]
        if name != "logstart" and is_news:
            send(name, **message)

    interactor.sendevent = send_some


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Let the garbage collector leave alone what is there once tests are collected: it stays, and is most of memory."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    gc.set_threshold(10_000)  # by default it looks after every 700 objects, and hypothesis notes each time that it does


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole units, as `--dist loadfile` hands out files."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped,unused-ignore]

    class LoadUnits(LoadFileScheduling):  # type: ignore[misc]  # its base has no types
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return LoadUnits(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, leave `full` to `make test-all`, and skip what needs a GPU where there is none.

    torch is looked at only when a test for a GPU was collected.
    """
    items.sort(key=lambda item: place(item.nodeid))
    if not RUNS_ALL:
        full = {item for item in items if item.get_closest_marker("full")}
        config.hook.pytest_deselected(items=list(full))
        items[:] = [item for item in items if item not in full]
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))
