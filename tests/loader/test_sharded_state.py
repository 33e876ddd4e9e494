"""Weights that are divided already: each rank has the model of the undivided checkpoint, out of files of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import RUNS_ALL, pick
from tests.distributed.ranks import run_ranks
from tests.loader.quantized_files import awq, float8, save_pair
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM, SamplingParams
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.distributed.groups import ParallelGroups
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

PROMPTS = [[5, 9, 33, 60, 4], [17], [80, 2, 2, 41, 63, 7, 8]]
NAMES = ["qwen3-moe", "llama-biases", "llama-tied", "qwen2"]


def save(name: str, folder: Path) -> Path:
    next(case for case in TINY_MODELS if case.name == name).save(folder)
    return folder


def divided(source: Path, out: Path, size: int, max_shard_bytes: int | None = None) -> Path:
    options = TargetOptions(tensor_parallel_size=size, max_shard_bytes=max_shard_bytes)
    convert(Checkpoint.open(str(source)), out, "sharded_state", options)
    return out


def tokens_of(folder: Path) -> Callable[[ParallelGroups], Any]:
    def body(groups: ParallelGroups) -> list[list[int]]:
        return PagedRunner(load(folder, groups=groups)).generate(PROMPTS, 8)

    return body


@pytest.mark.parametrize("name", NAMES[: pick(2, None)])
def test_ranks_have_the_model_of_the_whole(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "source")
    expected = run_ranks(tokens_of(source), 2)
    out = divided(source, tmp_path / "two", 2)
    assert sorted(file.name for file in out.glob("model-rank*")) == [
        "model-rank-00000-of-00002.safetensors",
        "model-rank-00001-of-00002.safetensors",
    ]
    assert run_ranks(tokens_of(out), 2) == expected
    alone = divided(source, tmp_path / "one", 1, max_shard_bytes=20_000)
    assert len(list(alone.glob("model-rank-00000-of-00001-*.safetensors"))) > 1
    found, whole = (PagedRunner(load(folder)).step({0: PROMPTS[0]})[0] for folder in (alone, source))
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("settings", "quantize"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(32)),
        ({"quant_method": "fp8", "weight_block_size": [48, 32]}, float8((48, 32), "weight_scale_inv")),
    ],
    ids=["awq", "fp8"],
)
def test_quantized_weights_stay_so(settings: dict[str, Any], quantize: Any, tmp_path: Path) -> None:
    save_pair(tmp_path, settings, lambda layer: True, quantize)
    out = divided(tmp_path / "quantized", tmp_path / "out", 2)
    assert run_ranks(tokens_of(out), 2) == run_ranks(tokens_of(tmp_path / "quantized"), 2)


def test_a_rank_opens_its_own_files_only(tmp_path: Path) -> None:
    out = divided(save("llama", tmp_path / "source"), tmp_path / "out", 2)
    (out / "model-rank-00001-of-00002.safetensors").write_bytes(b"damaged")

    from octavo.convert.folders import _OneOf

    load(out, groups=ParallelGroups(tensor=_OneOf(0, 2)))
    with pytest.raises(CheckpointError, match=r"model-rank-00001-of-00002\.safetensors: truncated or malformed"):
        load(out, groups=ParallelGroups(tensor=_OneOf(1, 2)))


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    out = divided(source, tmp_path / "out", 2)
    with pytest.raises(
        CheckpointError, match=r"no model-rank-00000-of-00001\.safetensors: it was written for tensor_parallel_size=2"
    ):
        load(out)
    with pytest.raises(UnsupportedModelError, match="a sharded state has no whole tensors; use its source"):
        convert(Checkpoint.open(str(out)), tmp_path / "again", "safetensors", TargetOptions())
    with pytest.raises(InvalidParameterError, match="tensor_parallel_size=7: at most 6: every rank needs an attention"):
        divided(source, tmp_path / "seven", 7)
    save("qwen3", tmp_path / "other")
    (out / "model-rank-00000-of-00002.safetensors").rename(tmp_path / "other" / "model-rank-00000-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"nothing for 'layers\.0\.attention\.head_norms' \(and 2 more\)"):
        load(tmp_path / "other", load_format="sharded_state")
    config = (source / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"'embedding' is not of this model or rank: .*must match the size"):
        load(tmp_path / "other", load_format="sharded_state")


@pytest.mark.parametrize("degree", ["tensor_parallel_size", *pick([], ["pipeline_parallel_size"])])
def test_ranks_read_their_parts(degree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with two ranks, or two stages of one, as a user starts it; but on threads by default."""
    if not RUNS_ALL:
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    size = 2 if degree == "tensor_parallel_size" else 1
    convert(Checkpoint.open("demo"), tmp_path / "out", "sharded_state", TargetOptions(tensor_parallel_size=size))
    params, texts = SamplingParams(temperature=0.0, max_tokens=12), []
    for name in ("demo", str(tmp_path / "out")):
        llm = LLM(name, max_model_len=128, threads=1, **({degree: 2} if name != "demo" else {}))
        texts.append(llm.generate("What is a block?", params, use_tqdm=False)[0].outputs[0].text)
        llm.exit()
    assert texts[1] == texts[0]
