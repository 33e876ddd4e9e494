"""Prefixes that are on disk when an engine starts: the same bytes as without, and never anything that was changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.models.latent import use_latent_layers
from tests.models.recurrent import use_recurrent_layers
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM, SamplingParams
from octavo.contracts.engine import SchedulerStats

PROMPTS = [random_prompt(length, seed=length) for length in (37, 50, 21)]
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, logprobs=2, seed=3)
Open = Callable[..., LLM]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of this test lie."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prefix"


@pytest.fixture
def start(checkpoint: GetCheckpoint) -> Open:
    def start(name: str = "qwen3", **options: Any) -> LLM:
        return open_llm(checkpoint, name, **{"prefix_cache_disk": 0.25, **options})

    return start


def stats(llm: LLM) -> SchedulerStats:
    found = llm.engine.metrics.stats
    assert found is not None
    return found


def run(llm: LLM) -> tuple[list[Any], list[int]]:
    """Return the answers to all prompts, and how many tokens of each were found."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.engine.check_integrity()
    return answers(outputs), [output.metrics.num_cached_tokens for output in outputs]


def check_restart(start: Open, *args: Any, **options: Any) -> None:
    """After a restart, prefixes are found, and every answer has the same bytes."""
    with start(*args, **options) as llm:
        before, found = run(llm)
        assert found == [0, 0, 0]
        again = run(llm)
        assert again[0] == before
    with start(*args, **options) as llm:
        assert run(llm) == again  # as much is found as in memory
        assert stats(llm).num_prefix_disk_hits_total == sum(again[1])
        assert run(llm) == again
        assert not stats(llm).prefix_disk_failures


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {}),
        pytest.param("demo in bfloat16", {}, marks=pytest.mark.full),
        ("demo in bfloat16", {"kv_cache_dtype": "int8"}),
        pytest.param("demo", {"kv_cache_dtype": "int8"}, marks=pytest.mark.full),
        ("qwen2-windows", {}),
        pytest.param("qwen3", {"max_num_batched_tokens": 14, "block_size": 16}, id="chunks"),
    ],
)
def test_a_restart_finds_prefixes_and_says_the_same(start: Open, name: str, options: dict[str, Any]) -> None:
    check_restart(start, name, **options)


@pytest.mark.parametrize("layers", pick([(0, 2)], [(0, 2), (0, 1, 2)]), ids=str)
def test_states_are_found(start: Open, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_layers(monkeypatch, layers)
    check_restart(start)


def test_latent_vectors_are_found(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    use_latent_layers(monkeypatch)
    check_restart(start)


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.full)],
    ids=str,
)
def test_ranks_find_them_together(start: Open, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    check_restart(start, **options)


def files_of(cache: Path, ending: str) -> list[Path]:
    return sorted(cache.glob(f"*/*{ending}"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


HEADER, ENTRY = 4096, 48
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a block": (lambda folder: flip(folder / "0.blocks", 5000), "damaged"),
    "a bit of an entry's hash": (lambda folder: flip(folder / "0.index", HEADER + 7), "damaged"),
    "a bit of an entry's checksum": (lambda folder: flip(folder / "0.index", HEADER + ENTRY + 41), "damaged"),
    "a bit of the header": (lambda folder: flip(folder / "0.index", 9), "of another format"),
    "an index of an older version": (lambda folder: (folder / "0.index").write_bytes(b"kv 0"), "of another format"),
    "blocks cut within one": (lambda folder: cut(folder / "0.blocks", 5000), "truncated"),
    "no blocks": (lambda folder: (folder / "0.blocks").unlink(), "truncated"),
    "an index cut within an entry": (lambda folder: cut(folder / "0.index", HEADER + ENTRY + 7), "truncated"),
    "an index cut behind an entry": (lambda folder: cut(folder / "0.index", HEADER + ENTRY), "truncated"),
    "an index cut within its header": (lambda folder: cut(folder / "0.index", 700), "of another format"),
    "blocks of somebody else": (lambda folder: (folder / "0.blocks").chmod(0o666), "refused"),
    "a folder of somebody else": (lambda folder: folder.chmod(0o777), "refused"),
}


@pytest.fixture
def written(start: Open, cache: Path) -> tuple[list[Any], Path]:
    """Answers, and the folder with the blocks of their prompts."""
    with start() as llm:
        run(llm)
        before, _ = run(llm)
    [folder] = cache.iterdir()
    return before, folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_changed_is_computed_and_said_once(
    start: Open, written: tuple[list[Any], Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, folder = written
    change, what = DAMAGES[damage]
    if damage == "a link":
        (folder / "0.blocks").rename(folder / "x")
        (folder / "0.blocks").symlink_to(folder / "x")
    else:
        change(folder)
    with start() as llm:
        found = run(llm)
        assert found[0] == before
        assert min(found[1]) < 20  # of the shortest prompt's 21 tokens: something was not served
        assert set(stats(llm).prefix_disk_failures) == {what}
        assert run(llm)[0] == before
    assert sum("prompts are computed instead" in line for line in caplog.messages) == 1
    if what != "refused":  # what was computed is written again
        with start() as llm:
            assert run(llm) == (before, [36, 48, 20])
            assert not stats(llm).prefix_disk_failures
