"""Expert-parallel ranks in processes of their own: the answers of one rank, whatever else goes on."""

from typing import Any

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import MAX_LEN, GetCheckpoint, MakeLLM
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.server.http_server import HttpServer
from tests.worker.threaded_ranks import ThreadedRanks

from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams

PREFIX = random_tokens(24, seed=0)
PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in (1, 3, 8, 13, 21, 33)]
PROMPTS += [{"prompt_token_ids": PREFIX[:length]} for length in (24, 20)]
PARAMS = [
    SamplingParams(seed=at, temperature=at % 2 * 0.8, max_tokens=12, ignore_eos=True) for at in range(len(PROMPTS))
]


def token_ids(llm: Any, order: int = 1) -> list[Any]:
    outputs = llm.generate(PROMPTS[::order], PARAMS[::order], use_tqdm=False)
    return [sample[0][0] for sample in answers(outputs)][::order]


# Of five experts.
@pytest.mark.parametrize(("name", "num_ranks"), pick([("qwen2-moe", 2)], [("qwen2-moe", 2), ("mixtral", 4)]))
def test_tokens_of_one_rank(name: str, num_ranks: int, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = token_ids(make_llm(name, enable_prefix_caching=False))
    if not RUNS_ALL:  # a server has its ranks in processes
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    llm = make_llm(
        name,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=True,
        max_num_batched_tokens=14,  # chunked
        num_kv_blocks=MAX_LEN // 4 + 1,  # preempted
    )
    assert token_ids(llm) == alone
    assert token_ids(llm, order=-1) == alone  # prefixes are cached, and others are in the batch
    for at, prompt in enumerate(PROMPTS):
        llm.engine.abort_request(llm.engine.add_request(prompt, PARAMS[at]))
        llm.engine.step()
    assert token_ids(llm) == alone


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.full)],
)
def test_every_choice_of_an_expert_is_counted_once(options: dict[str, Any], make_llm: MakeLLM) -> None:
    llm = make_llm("qwen2-moe-windows", enable_prefix_caching=False, **options)  # layer 1 of three has experts
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    # The last token of an answer is not computed any further.
    num_tokens = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)
    [load] = llm.engine._front.outputs.metrics.expert_load_by_replica.values()
    assert {layer: sum(counts) for layer, counts in load.of_layers().items()} == {1: 2 * num_tokens}


@pytest.mark.full  # by default other servers have the core in a process, and test_pipeline_processes.py has ranks there
def test_a_server_answers_as_one_rank_does_and_shows_its_experts(checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = make_llm("qwen3-moe").generate(PROMPTS, params, use_tqdm=False)
    body = {"prompt": [output.prompt_token_ids for output in alone], "temperature": 0, "max_tokens": 12}
    flags = ["--tokenizer", "demo", "--dtype", "float32", "--max-model-len", str(MAX_LEN), "--num-kv-blocks", "64"]
    flags += ["--expert-metrics", "--tensor-parallel-size", "2", "--enable-expert-parallel"]
    with HttpServer(*flags, model=str(checkpoint("qwen3-moe").folder)) as server:
        options = {"model": server.client.get("/v1/models").json()["data"][0]["id"], "ignore_eos": True}
        reply = server.post("/v1/completions", {**body, **options}).raise_for_status().json()
        metrics = server.client.get("/metrics").text
    assert [choice["text"] for choice in reply["choices"]] == [output.outputs[0].text for output in alone]
    each = [line for line in metrics.splitlines() if line.startswith("octavo_expert_tokens_total{")]
    counts = [float(line.rpartition(" ")[2]) for line in each]
    assert len(counts) == 3 * 5  # layers, experts
    assert sum(counts) > 2 * 3 * len(PROMPTS)
