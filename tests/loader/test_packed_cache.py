"""Packed weights on disk: the same bytes after a second start, never someone else's, never too many."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tests.models.paged import PagedRunner
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.device.manager import DeviceManager
from octavo.kernels.dispatch import is_built
from octavo.layers.context import BuildContext
from octavo.layers.quant.registry import make_schemes
from octavo.loader.packed_cache import Idleness, PackedCache, cache_folder, checkpoint_digest
from octavo.loader.registry import get_model_loader
from octavo.loader.safetensors import SafetensorsLoader
from octavo.models.interfaces import CausalLM

needs_kernels = pytest.mark.skipif(
    not is_built() or os.environ.get("OCTAVO_CPU_LEVEL") == "torch", reason="only the C++ kernels show their layout"
)
TOKENS = [5, 9, 33, 60, 4]
KEEP_SOON = PackedCache.keep_soon
SOME = {"a": torch.arange(1024.0), "b": torch.ones(3, 7, dtype=torch.bfloat16), "c": torch.zeros(0)}


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("octavo.loader.packed_cache._WORTH_KEEPING_BYTES", 0)
    monkeypatch.setattr(PackedCache, "keep_soon", PackedCache.keep)  # so that it is there when the test looks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint with every kind of weight: head norms, biases, a tied head."""
    return save("qwen3", tmp_path)


def save(name: str, tmp_path: Path) -> Path:
    next(case for case in TINY_MODELS if case.name == name).save(tmp_path / "model")
    return tmp_path / "model"


def start(checkpoint: Path, quantization: str | None = None, cache_bytes: int = 1 << 30) -> CausalLM:
    devices = DeviceManager("cpu")
    model_config = read_model_config(checkpoint, model="tiny", dtype="bfloat16")
    schemes = make_schemes(model_config.quantization, quantization)
    context = BuildContext(
        kernels=devices.kernels(torch.bfloat16, schemes.forms),
        attention=devices.attention(torch.bfloat16),
        dtype=torch.bfloat16,
        device=devices.device,
        schemes=schemes,
    )
    loader = get_model_loader(LoadConfig(load_format="auto", seed=0, packed_cache_bytes=cache_bytes))
    return loader.load_model(model_config, context)


def logits_of(model: CausalLM) -> torch.Tensor:
    return PagedRunner(model).step({0: TOKENS})[0]


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_second_start_reads_no_checkpoint_and_computes_the_same_bits(
    name: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(name, tmp_path)
    first = start(checkpoint, quantization)
    assert first.mapped_bytes == 0
    monkeypatch.delattr(SafetensorsLoader, "tensors")
    second = start(checkpoint, quantization)
    assert second.mapped_bytes > 0
    assert torch.equal(logits_of(second), logits_of(first))


@needs_kernels
def test_another_checkpoint_in_the_same_place_is_another_model(checkpoint: Path) -> None:
    before = logits_of(start(checkpoint))
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    content[-4000:] = bytes(4000)
    weights.write_bytes(content)
    os.utime(weights, ns=times)  # as a careless copy does; the inode knows better
    assert not torch.equal(logits_of(start(checkpoint)), before)


@needs_kernels
def test_layouts_do_not_meet(checkpoint: Path) -> None:
    for quantization in (None, "int8", "int4"):
        start(checkpoint, quantization)
    assert len(list(cache_folder().iterdir())) == 3


@needs_kernels
def test_nothing_is_kept_where_the_user_says_so(checkpoint: Path) -> None:
    start(checkpoint, cache_bytes=0)
    assert not cache_folder().exists()


@needs_kernels
def test_a_damaged_file_is_made_again(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logits_of(start(checkpoint))
    (file,) = cache_folder().iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    again = start(checkpoint)
    assert again.mapped_bytes == 0
    assert "unreadable and will be rewritten" in caplog.text
    assert torch.equal(logits_of(again), before)
    assert start(checkpoint).mapped_bytes > 0


def test_tensors_come_back_aligned() -> None:
    cache = PackedCache(cache_folder(), 1 << 20)
    cache.keep("one", SOME)
    found = cache.find("one")
    assert found is not None
    assert found.keys() == SOME.keys()
    assert all(torch.equal(found[name], SOME[name]) and found[name].dtype == SOME[name].dtype for name in SOME)
    assert found["a"].data_ptr() % 64 == 0
    assert cache.find("another") is None


def test_what_was_used_least_recently_goes_first() -> None:
    cache = PackedCache(cache_folder(), 20_000)  # two files of 4,096 + 4,138 bytes, not three
    for name in ("old", "used"):
        cache.keep(name, SOME)
        os.utime(cache_folder() / f"{name}.safetensors", (1, 1))
    assert cache.find("used") is not None
    cache.keep("new", SOME)
    assert {file.stem for file in cache_folder().iterdir()} == {"used", "new"}


def test_what_never_fits_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    PackedCache(cache_folder(), 1000).keep("one", SOME)
    assert not list(cache_folder().iterdir())
    assert "not kept on disk" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where a folder would be")
    PackedCache(cache_folder(), 1 << 20).keep("one", SOME)
    assert "packed weights are not kept on disk" in caplog.text


def test_parts_of_killed_writers_go(tmp_path: Path) -> None:
    cache_folder().mkdir(parents=True)
    for name, age_s in (("old.part", 1), ("young.part", None)):
        (cache_folder() / name).touch()
        if age_s is not None:
            os.utime(cache_folder() / name, (age_s, age_s))
    PackedCache(cache_folder(), 1 << 20).keep("one", SOME)
    assert {file.name for file in cache_folder().iterdir()} == {"young.part", "one.safetensors"}


def test_a_copy_elsewhere_is_another_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert checkpoint_digest(copy, "layout") != checkpoint_digest(checkpoint, "layout")
    assert checkpoint_digest(checkpoint, "layout") == checkpoint_digest(checkpoint, "layout")
    assert checkpoint_digest(checkpoint, "another") != checkpoint_digest(checkpoint, "layout")


class Clock:
    """Time as the writer sees it, in which other threads use a share of a core."""

    def __init__(self, busy_until_s: float, share: float = 1.0) -> None:
        self.now_s, self._busy_until_s, self._share = 0.0, busy_until_s, share

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def process_time(self) -> float:
        return self._share * min(self.now_s, self._busy_until_s) + self.thread_time()

    def thread_time(self) -> float:
        return 0.9 * self.now_s


@pytest.mark.parametrize(("clock", "waits_s"), [(Clock(7.0), 7.0), (Clock(7.0, share=0.1), 0.0), (Clock(1e9), 30.0)])
def test_the_writer_waits_until_nobody_computes_but_not_for_ever(
    clock: Clock, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.loader.packed_cache.time", clock)
    Idleness(patience_s=30.0).wait()
    assert waits_s <= clock.now_s < waits_s + 0.25


def test_a_file_is_written_while_a_thread_sleeps() -> None:
    writer = KEEP_SOON(PackedCache(cache_folder(), 1 << 20), "soon", SOME)
    assert writer is not threading.current_thread()
    writer.join()
    found = PackedCache(cache_folder(), 1 << 20).find("soon")
    assert found is not None
    assert torch.equal(found["a"], SOME["a"])
