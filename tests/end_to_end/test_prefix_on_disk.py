"""Prefixes that are on disk when an engine starts: the same bytes as without, and never anything that was changed."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.fakes.queued_device import RecordedQueue
from tests.models.hybrid import keep_states_often
from tests.models.mtp import make_mtp
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM, SamplingParams
from octavo.contracts.engine import SchedulerStats
from octavo.device.cpu import CpuKind
from octavo.engine.process_client import ProcessClient

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


def check_restart(start: Open, *args: Any, is_invariant: bool = True, **options: Any) -> None:
    """After a restart, prefixes are found, and every answer has the same bytes; without invariance, as from memory."""
    with start(*args, **options) as llm:
        before, found = run(llm)
        assert found == [0, 0, 0]
        again = run(llm)
        assert again[0] == before or not is_invariant
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


@pytest.mark.parametrize("name", pick(["qwen3-5"], ["qwen3-5", "qwen3-next", "lfm2-moe", "falcon-h1"]))
def test_states_are_found(start: Open, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_states_often(monkeypatch)
    check_restart(start, name)


def test_latent_vectors_are_found(start: Open) -> None:
    check_restart(start, "deepseek-v3")


def test_a_device_with_a_queue_finds_them(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are in flight, and what has been read is put in its place between them."""
    monkeypatch.setattr(CpuKind, "queue", lambda kind: RecordedQueue())
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")
    check_restart(start, is_invariant=False)  # torch's ops


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo in bfloat16", "qwen2-windows"])
def test_a_gpu_finds_them(start: Open, name: str) -> None:
    check_restart(start, name, device="cuda")


@pytest.mark.full
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_in_processes_find_them(start: Open, options: dict[str, Any]) -> None:
    check_restart(start, "demo", engine_process=True, **options)


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.full)],
    ids=str,
)
def test_ranks_find_them_together(start: Open, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    check_restart(start, **options)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("x")))


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
    "a link": (lambda folder: link(folder / "0.blocks"), "refused"),
}


@pytest.fixture
def written(start: Open, cache: Path) -> tuple[list[Any], Path]:
    """Answers, and the folder with the blocks of their prompts."""
    with start() as llm:
        run(llm)
        before, _ = run(llm)
    [folder] = cache.iterdir()
    return before, folder


SOME_DAMAGES = ["a bit of a block", "a bit of an entry's hash", "no blocks", "an index cut within an entry", "a link"]


@pytest.mark.parametrize("damage", pick(SOME_DAMAGES, list(DAMAGES)))
def test_what_was_changed_is_computed_and_said_once(
    start: Open, written: tuple[list[Any], Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, folder = written
    change, what = DAMAGES[damage]
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


def test_a_full_disk_ends_the_writing_and_nothing_else(
    start: Open, written: tuple[list[Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands in for the disk: the system's error comes from the same call."""
    before, folder = written
    shutil.rmtree(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with start() as llm:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        try:
            assert run(llm)[0] == before
            assert run(llm) == (before, [36, 48, 20])
            llm.exit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sum("blocks are not written any more: File too large" in line for line in caplog.messages) == 1
    with start() as llm:
        assert run(llm)[0] == before
        assert not stats(llm).prefix_disk_failures


def test_two_engines_at_once_have_files_of_their_own(start: Open, cache: Path) -> None:
    with start() as one, start() as other:
        assert run(one) == run(other)
        assert len(list(cache.iterdir())) == 2
    with start() as one, start() as other:
        assert run(one) == run(other)
        assert [min(stats(llm).num_prefix_disk_hits_total, 104) for llm in (one, other)] == [104, 104]


def test_other_weights_and_dtypes_find_nothing(start: Open, checkpoint: GetCheckpoint, cache: Path) -> None:
    with start() as llm:
        run(llm)
    for options in ({"dtype": "bfloat16"}, {"block_size": 8}):
        with start(**options) as llm:
            assert run(llm)[1] == [0, 0, 0]
    weights = checkpoint("qwen3").folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with start() as llm:
        assert run(llm)[1] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 4


def test_only_as_much_is_kept_as_may_be(start: Open, cache: Path) -> None:
    """A block of the tiny model takes 4 KiB here: 10 slots hold the prompt that was used last, its beginning first."""
    few = {"prefix_cache_disk": 10 * 4096 / 2**30}
    with start(**few) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, PARAMS, use_tqdm=False)
        llm.generate(random_prompt(33, seed=9), PARAMS, use_tqdm=False)
        assert stats(llm).prefix_disk_bytes <= 10 * 4096
    [blocks] = cache.glob("*/0.blocks")
    assert blocks.stat().st_size <= 10 * 4096
    with start(**few) as llm:
        [output] = llm.generate(random_prompt(33, seed=9), PARAMS, use_tqdm=False)
        assert output.metrics.num_cached_tokens > 0


def test_files_of_others_are_deleted_before_there_are_too_many(start: Open, cache: Path) -> None:
    with start(prefix_cache_disk=0.25) as llm:
        run(llm)
    [old] = cache.iterdir()
    with start(prefix_cache_disk=0.25, block_size=8) as llm:
        run(llm)
        assert old.exists()
    with start(prefix_cache_disk=4 * 4096 / 2**30, block_size=16) as llm:
        run(llm)
    assert not old.exists()
    assert len(list(cache.iterdir())) == 1


def test_what_memory_has_no_room_for_is_read_back(start: Open) -> None:
    """Evicted blocks are copied before they are overwritten, and read again without a restart."""
    prompts = [random_prompt(40, seed=100 + index) for index in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with start(prefix_cache_disk=0, num_kv_blocks=20) as llm:
        expected = [llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with start(num_kv_blocks=20) as llm:
        for _ in range(3):
            outputs = [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts]
            llm.engine.check_integrity()
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.metrics.num_cached_tokens for output in outputs] == [36] * 6
        llm.engine.reset_prefix_cache()
        [output] = llm.generate(prompts[0], greedy, use_tqdm=False)
        assert output.metrics.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected[0]


KILLED = """
import sys
import torch
from octavo import LLM, SamplingParams
def random_prompt(length, seed):  # that of tests.end_to_end.support, which imports transformers
    tokens = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))
    return {"prompt_token_ids": tokens.tolist()}
llm = LLM(sys.argv[1], tokenizer="demo", dtype="float32", max_model_len=64, block_size=4, num_kv_blocks=512,
          prefix_cache_disk=200 * 4096 / 2**30)
print("ready", flush=True)
for seed in range(100000):
    llm.generate([random_prompt(60, seed=1000 + seed + index) for index in range(4)],
                 SamplingParams(max_tokens=1), use_tqdm=False)
"""


def test_a_writer_that_is_killed_leaves_nothing_wrong(start: Open, checkpoint: GetCheckpoint, cache: Path) -> None:
    """It overwrites slots all the time. What is left is served, and right, or not there: no checksum fails."""
    command = [sys.executable, "-c", KILLED, str(checkpoint("qwen3").folder)]
    for _ in range(pick(1, 8)):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            blocks = next(cache.glob("*/0.blocks"))
            before = blocks.stat().st_mtime_ns
            while blocks.stat().st_mtime_ns == before:
                time.sleep(0.01)
            writer.send_signal(signal.SIGKILL)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=1, logprobs=1)
    prompts = [random_prompt(60, seed=1000 + seed) for seed in range(60)]
    with start(prefix_cache_disk=0) as llm:
        expected = answers(llm.generate(prompts, greedy, use_tqdm=False))
    with start(prefix_cache_disk=200 * 4096 / 2**30) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert answers(outputs) == expected
        assert stats(llm).num_prefix_disk_hits_total > 0
        assert not stats(llm).prefix_disk_failures


@pytest.mark.full  # by default a writer is killed, above, and engines find what others have written
@pytest.mark.parametrize("stands_by", [False, True])
def test_the_next_core_finds_what_a_killed_one_has_written(start: Open, cache: Path, *, stands_by: bool) -> None:
    """An idle engine writes, so kill -9 loses what the last moments brought. One that stands by opens no files."""
    with start(engine_process=True, hot_standby=stands_by) as llm:
        client = llm.engine._front.client
        assert isinstance(client, ProcessClient)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        while not (index := next(cache.glob("*/0.index"), cache)).is_file():
            time.sleep(0.01)
        while index.stat().st_size < HEADER + ENTRY * sum((length + 11) // 4 for length in (37, 50, 21)):
            time.sleep(0.01)  # full blocks of prompts and answers
        os.kill(client.pids[0], signal.SIGKILL)
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert answers(again) == answers(outputs)
        assert [output.metrics.num_cached_tokens for output in again] == [36, 48, 20]
        assert stats(llm).num_prefix_disk_hits_total == 104
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("kind", ["MTP", pytest.param("draft_model", marks=pytest.mark.full)])
def test_what_drafts_begins_behind_what_comes_from_disk(
    kind: str, checkpoint: GetCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own keys and values are not kept: it computes blocks again, or begins after them; no bit depends on it."""
    keep_states_often(monkeypatch)
    make_mtp("qwen3-5").save(tmp_path / "model")
    config = {"method": "mtp", "adaptive": False}
    if kind == "draft_model":
        config = {"model": str(checkpoint("llama").folder), "adaptive": False}
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "num_kv_blocks": 512}

    def start(speculative_config: dict[str, Any]) -> LLM:
        options["speculative_config"] = speculative_config
        return LLM(str(tmp_path / "model"), tokenizer="demo", prefix_cache_disk=0.25, **options)

    with start({"method": "none"}) as llm:
        expected, _ = run(llm)
    with start(config) as llm:
        assert run(llm)[0] == expected
        assert sum(run(llm)[1]) > 0
    with start(config) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert answers(outputs) == expected
        assert stats(llm).num_prefix_disk_hits_total > 0
        assert sum(output.metrics.num_drafts for output in outputs) > 0
        assert run(llm)[0] == expected
