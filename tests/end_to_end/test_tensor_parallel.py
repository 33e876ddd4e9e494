"""Engines whose ranks share every layer: the tokens of one rank, the same bytes by every path.

Ranks are threads by default where their being processes is not the point: each process imports torch.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import GREEDY as GREEDY_OPTIONS
from tests.end_to_end.support import answers, random_prompt
from tests.end_to_end.test_greedy import GREEDY, PROMPTS, assert_greedy
from tests.end_to_end.test_same_bytes import PARAMS, one_by_one
from tests.end_to_end.test_same_bytes import PROMPTS as ALL_WAYS
from tests.executor.processes import ranks_below
from tests.server.http_server import HttpServer
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM
from octavo.errors import CheckpointError, EngineDeadError, InvalidParameterError
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams


# One kv head for two and for four ranks; two for four; three and eight, which ranks hold unevenly or evenly.
@pytest.mark.full  # by default test_pipeline_processes has tensor-parallel stages, and what follows every path
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-gqa-8", 2),
        ("llama-gqa-8", 4),
        ("qwen3-tied-gqa-8", 4),
        ("llama-gqa-2-of-6", 2),
        ("mistral-window", 4),
        ("qwen3-gqa-2-of-16", 4),
        ("qwen2-moe", 2),
    ],
)
def test_greedy_is_that_of_transformers_with_all_going_on(
    name: str, size: int, checkpoint: GetCheckpoint, make_llm: MakeLLM
) -> None:
    """Chunks, preemption, aborts, then prefixes found in the cache."""
    reference = checkpoint(name).reference
    llm = make_llm(
        name, tensor_parallel_size=size, num_kv_blocks=MAX_LEN // BLOCK_SIZE, max_num_batched_tokens=16, max_num_seqs=8
    )
    doomed = [llm.engine.add_request(random_prompt(20, seed=seed), GREEDY) for seed in range(3)]
    for _ in range(3):
        llm.engine.step()
    for request_id in doomed:
        llm.engine.abort_request(request_id)
    outputs = llm.generate(PROMPTS[6:14], GREEDY, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert_greedy(reference, outputs)
    llm.generate(PROMPTS[11], GREEDY, use_tqdm=False)
    [again] = llm.generate(PROMPTS[11], GREEDY, use_tqdm=False)
    assert again.metrics.num_cached_tokens > 0
    assert_greedy(reference, [again])


BYTES_CASES: list[tuple[str, dict[str, Any]]] = [("qwen3-mixed-windows", {})]
if native_kernels() is not None:
    in_int8: tuple[str, dict[str, Any]] = ("demo in bfloat16", {"quantization": "int8"})
    in_bfloat16: tuple[str, dict[str, Any]] = ("qwen3-mixed-windows in bfloat16", {})
    BYTES_CASES = pick([in_bfloat16], [*BYTES_CASES, ("demo in bfloat16", {}), in_int8])


@pytest.mark.parametrize(("name", "options"), BYTES_CASES)
def test_bytes_do_not_depend_on_the_path(
    name: str, options: dict[str, Any], checkpoint: GetCheckpoint, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of sampling, alone; then together, from the cache, in chunks, preempted, and op by op."""
    if not RUNS_ALL:
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    llm = make_llm(name, tensor_parallel_size=2, **options)
    alone = one_by_one(llm)
    assert answers(llm.generate(ALL_WAYS, PARAMS, use_tqdm=False)) == alone
    options |= {"num_kv_blocks": 24, "max_num_batched_tokens": 14, "enforce_eager": True}
    with open_llm(checkpoint, name, tensor_parallel_size=2, **options) as squeezed:
        outputs = squeezed.generate(ALL_WAYS, PARAMS, use_tqdm=False)
    assert answers(outputs) == alone
    assert any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.full
def test_a_server_answers_as_one_rank_does(make_llm: MakeLLM) -> None:
    prompts = ["Octavo is", "What is a block?"]
    alone = make_llm("demo").generate(prompts, SamplingParams.from_options(GREEDY_OPTIONS), use_tqdm=False)
    body = {"model": "demo", "prompt": prompts, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    flags = ["--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", str(MAX_LEN)]
    with HttpServer(*flags) as server:
        reply = server.client.post("/v1/completions", json=body).raise_for_status().json()
    assert [choice["text"] for choice in reply["choices"]] == [output.outputs[0].text for output in alone]


@pytest.mark.full
def test_what_is_wrong_with_a_checkpoint_is_said_by_the_engine(checkpoint: GetCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        LLM(str(folder), tokenizer="demo", tensor_parallel_size=2)


@pytest.mark.full  # by default test_pipeline_processes.py kills one
@pytest.mark.parametrize("victim", [0, 1])
def test_who_waits_in_a_sum_for_a_rank_that_was_killed_does_not_wait_for_ever(victim: int) -> None:
    llm = LLM("demo", tensor_parallel_size=2, max_model_len=MAX_LEN)
    llm.engine.add_request(PROMPTS[8], SamplingParams.from_options(GREEDY_OPTIONS))
    llm.engine.step()
    ranks = ranks_below(os.getpid())
    assert len(ranks) == 2
    os.kill(ranks[victim], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"rank {victim}"):
        llm.engine.step()
    llm.exit()
    assert not ranks_below(os.getpid())


def test_more_ranks_than_heads_are_refused(checkpoint: GetCheckpoint) -> None:
    with pytest.raises(InvalidParameterError, match="at most 6"):
        LLM(str(checkpoint("llama").folder), tokenizer="demo", tensor_parallel_size=7)
