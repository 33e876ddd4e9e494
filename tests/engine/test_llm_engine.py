"""`LLMEngine` around a core without torch: requests in, text out, nothing lost on the way."""

import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import FAILURES, MakeEngine
from tests.engine.interrupts import AlarmError, alarms, endure
from tokenizers import Tokenizer as Backend

from octavo.contracts.engine import EngineCoreRequest, ExtraInputs
from octavo.demo import demo_model_path
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import EngineDeadError, InvalidParameterError, PromptTooLongError, UnknownOptionError
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestPriority, SamplingParams
from octavo.server.openai.chat_prompt import token_ids_of
from octavo.testing import FakeExecutor
from octavo.tokenizer.tokenizer import Tokenizer


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; return the last output of every request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs, _ = engine.step()
        last.update({output.request_id: output for output in outputs})
    return last


def test_generate_returns_outputs_in_the_order_of_the_prompts(engine: LLMEngine) -> None:
    prompts = ["a", "a longer prompt", {"prompt_token_ids": [5, 6, 7]}]
    params = [SamplingParams(max_tokens=count, seed=1, ignore_eos=True) for count in (9, 3, 5)]
    outputs = engine.generate(prompts, params)
    assert [output.prompt for output in outputs] == ["a", "a longer prompt", None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 5]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert outputs[2].prompt_token_ids == [5, 6, 7]


def test_an_output_ends_at_the_tokenizers_end_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    """As after fine-tuning for chats, which often leaves the settings of generation as they were."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    processed = make_engine(model=str(folder)).front.process({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1))
    assert processed.samples[0].eos_token_ids == [7, 2]


def test_text_is_the_tokenizers_text_of_the_tokens(engine: LLMEngine) -> None:
    output = engine.generate("Hello", SamplingParams(max_tokens=40, seed=3, ignore_eos=True))[0].outputs[0]
    assert output.text == engine.front.tokenizer.decode(output.token_ids)


def test_step_by_hand_reports_progress_and_work(engine: LLMEngine) -> None:
    request_id = engine.add_request({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=3, ignore_eos=True))
    (first,), num_tokens = engine.step()
    assert (first.request_id, num_tokens, first.finished) == (request_id, 3, False)
    (second,), num_tokens = engine.step()
    assert (len(second.outputs[0].token_ids), num_tokens) == (2, 1)
    (third,), _ = engine.step()
    assert third.finished
    assert engine.step() == ([], 0)


def test_a_seed_is_drawn_and_reproduces_the_answer(engine: LLMEngine) -> None:
    first = engine.generate("Hi", SamplingParams(max_tokens=8))[0].outputs[0]
    again = engine.generate("Hi", SamplingParams(max_tokens=8, seed=first.seed))[0].outputs[0]
    other = engine.generate("Hi", SamplingParams(max_tokens=8))[0].outputs[0]
    assert first.token_ids == again.token_ids
    assert other.seed != first.seed


def test_an_engine_seed_makes_unseeded_requests_reproducible(make_engine: MakeEngine) -> None:
    runs = [[out.outputs[0].seed for out in make_engine(seed=7).generate(["a", "b"])] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_n_samples_differ_and_each_is_reproducible_alone(engine: LLMEngine) -> None:
    samples = engine.generate("Hi", SamplingParams(max_tokens=6, n=3, seed=9, ignore_eos=True))[0].outputs
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in samples}) == 3
    alone = engine.generate("Hi", SamplingParams(max_tokens=6, seed=samples[2].seed, ignore_eos=True))[0].outputs[0]
    assert alone.token_ids == samples[2].token_ids


def test_a_stop_string_ends_the_request_in_front_and_in_the_core(engine: LLMEngine) -> None:
    plain = engine.generate("Hi", SamplingParams(max_tokens=50, seed=2, ignore_eos=True))[0].outputs[0]
    stop = plain.text[10:13]
    params = SamplingParams(max_tokens=50, seed=2, stop=stop, ignore_eos=True)
    output = engine.generate("Hi", params)[0].outputs[0]
    assert output.text == plain.text[: plain.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == plain.token_ids[: len(output.token_ids)]
    included = engine.generate("Hi", params.replace(include_stop_str_in_output=True))[0].outputs[0]
    assert included.text == output.text + stop
    engine.step()  # the core processes the aborts
    assert engine.step() == ([], 0)  # and has nothing left to compute
    engine.check_integrity()


def test_a_stop_token_counts_but_is_not_shown(engine: LLMEngine) -> None:
    plain = engine.generate("Hi", SamplingParams(max_tokens=20, seed=2, ignore_eos=True))[0].outputs[0]
    stop_id = plain.token_ids[5]
    params = SamplingParams(max_tokens=20, seed=2, stop_token_ids=[stop_id], ignore_eos=True)
    output = engine.generate("Hi", params)[0].outputs[0]
    length = plain.token_ids.index(stop_id) + 1
    assert output.token_ids == plain.token_ids[:length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)
    assert output.text == engine.front.tokenizer.decode(plain.token_ids[: length - 1])


def test_abort_ends_a_waiting_and_a_running_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    running, waiting, kept = (engine.add_request("Hi", params) for _ in range(3))
    engine.step()
    engine.abort_request(running)
    engine.abort_request(waiting)
    engine.abort_request("never seen")
    last = run(engine)
    assert [last[rid].outputs[0].finish_reason for rid in (running, waiting, kept)] == ["abort", "abort", "length"]
    assert len(last[running].outputs[0].token_ids) == 1


def test_a_forward_that_raises_fails_its_own_requests_only(engine: LLMEngine) -> None:
    doomed = engine.add_request("Hi", SamplingParams(max_tokens=5))
    state = engine.front.outputs.find(doomed)
    assert state is not None
    doomed_ids = state.unfinished_core_ids()
    FAILURES.append(lambda order: set(doomed_ids) <= set(order.req_ids))
    (output,), _ = engine.step()
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "RuntimeError: failed as requested"
    assert engine.generate("Hi", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].finish_reason == "length"


def test_generate_leaves_requests_of_others_alone(engine: LLMEngine) -> None:
    mine = engine.add_request("Hi", SamplingParams(max_tokens=2, ignore_eos=True))
    engine.generate("Hello", SamplingParams(max_tokens=9, ignore_eos=True))
    (output,), _ = engine.step()
    assert (output.request_id, output.finished) == (mine, True)


def test_a_signal_during_a_step_ends_the_call_and_nothing_else(engine: LLMEngine) -> None:
    def interrupt(order: object) -> bool:
        FAILURES.clear()
        os.kill(os.getpid(), signal.SIGINT)
        return False

    mine = engine.add_request("Hi", SamplingParams(max_tokens=2, ignore_eos=True))
    FAILURES.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["Hi", "Hello"], SamplingParams(max_tokens=5000, ignore_eos=True))
    assert engine.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True))[0].finished
    assert [(output.request_id, output.finished) for output in engine.step()[0]] == [(mine, True)]
    assert not engine.has_unfinished_requests()


def test_an_interrupted_step_is_returned_by_the_next_one(engine: LLMEngine) -> None:
    def interrupt(order: object) -> bool:
        FAILURES.clear()
        os.kill(os.getpid(), signal.SIGALRM)
        assert has_left.wait(10.0)  # the caller leaves before the step ends
        return False

    has_left = threading.Event()
    request_id = engine.add_request("Hi", SamplingParams(max_tokens=1, ignore_eos=True))
    FAILURES.append(interrupt)
    with alarms(), pytest.raises(AlarmError):
        engine.step()
    has_left.set()
    assert engine.has_unfinished_requests()
    assert [(output.request_id, output.finished) for output in engine.step()[0]] == [(request_id, True)]
    assert engine.step() == ([], 0)


def test_interrupts_at_random_moments(engine: LLMEngine) -> None:
    endure(engine, ["Hi", "Hello", "Well"], SamplingParams(max_tokens=20, seed=4, n=2, ignore_eos=True), times=20)


def test_calls_from_several_threads_run_together_and_none_sees_the_others(engine: LLMEngine) -> None:
    params = [SamplingParams(max_tokens=30 + number, seed=number, ignore_eos=True) for number in range(6)]
    alone = [engine.generate("Hi", one)[0].outputs for one in params]
    with ThreadPoolExecutor(len(params)) as threads:
        together = list(threads.map(lambda one: engine.generate("Hi", one)[0].outputs, params))
    assert together == alone


def test_exit_ends_the_calls_of_other_threads(engine: LLMEngine) -> None:
    def note(order: object) -> bool:
        running.set()
        return False

    running = threading.Event()
    FAILURES.append(note)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, "Hi", SamplingParams(max_tokens=None, ignore_eos=True))
        assert running.wait(10.0)
        engine.exit()
        with pytest.raises(EngineDeadError, match="was closed"):
            waiting.result()


def test_an_engine_that_nobody_keeps_lets_its_thread_go(fake_executors: list[FakeExecutor]) -> None:
    LLMEngine("demo", block_size=4).generate("Hi", SamplingParams(max_tokens=1))
    gc.collect()
    assert fake_executors[0].has_exited
    assert "octavo-engine" not in {thread.name for thread in threading.enumerate()}


def test_prefix_cache_is_used_reported_and_reset(engine: LLMEngine) -> None:
    prompt = {"prompt_token_ids": list(range(16))}  # exactly four blocks
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    cached = [engine.generate(prompt, params)[0].metrics.num_cached_tokens for _ in range(2)]
    assert cached == [0, 12]  # at most all but one token, in whole blocks
    assert engine.generate(prompt, params, cache_salt="tenant")[0].metrics.num_cached_tokens == 0
    engine.reset_prefix_cache()
    assert engine.generate(prompt, params)[0].metrics.num_cached_tokens == 0


def bad_requests() -> Iterator[tuple[object, SamplingParams | None, dict[str, Any], str]]:
    yield "", None, {}, "prompt"
    yield 7, None, {}, "prompt"
    yield {"prompt_token_ids": [10**6]}, None, {}, "prompt_token_ids"
    yield {"prompt_token_ids": ["x"]}, None, {}, "prompt_token_ids"
    yield "Hi", SamplingParams(stop_token_ids=[10**6]), {}, "stop_token_ids"
    yield "Hi", SamplingParams(logit_bias={10**6: 1.0}), {}, "logit_bias"
    yield "Hi", SamplingParams(allowed_token_ids=[10**6]), {}, "allowed_token_ids"
    yield "Hi", None, {"priority": 9}, "priority"
    yield "Hi", None, {"cache_salt": 5}, "cache_salt"
    yield "Hi", None, {"cache_salt": "\ud800"}, "cache_salt"
    yield "Hi", SamplingParams(max_tokens=None, min_tokens=10**6), {}, "prompt"


@pytest.mark.parametrize(("prompt", "params", "options", "field"), list(bad_requests()))
def test_bad_requests_name_the_field_and_disturb_nothing(
    engine: LLMEngine, prompt: object, params: SamplingParams | None, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        engine.generate(["fine", prompt], params, **options)
    assert caught.value.field == field
    assert not engine.has_unfinished_requests()


def test_tokens_that_only_the_tokenizer_has_are_errors(tmp_path: Path, make_engine: MakeEngine) -> None:
    """As after a [PAD] was added to a tokenizer, but no row to the embedding."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["[PAD]"])
    backend.save(str(folder / "tokenizer.json"))
    engine = make_engine(str(folder))
    inputs, last = engine.front.inputs, engine.front.config.model.vocab_size - 1
    for prompt, field in (
        ("Hi [PAD]", "prompt"),
        (inputs.chat_prompt([{"role": "user", "content": "[PAD]"}]), "prompt_token_ids"),
        (MultiModalPrompt(text="[PAD]", token_ids=[1, last + 1], extra_inputs=ExtraInputs()), "prompt"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
    ):
        with pytest.raises(InvalidParameterError, match=f"0 to {last}") as caught:
            engine.generate(["fine", prompt])
        assert caught.value.field == field
    (output,) = engine.generate("Hi", SamplingParams(bad_words=["[PAD]"]))  # never sampled: nothing to ban
    assert output.finished


def test_a_prompt_that_cannot_fit_is_told_the_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=16)
    with pytest.raises(PromptTooLongError, match="maximum context length is 16 tokens"):
        engine.add_request({"prompt_token_ids": [1] * 16})
    output = engine.generate({"prompt_token_ids": [1] * 15}, SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 1


def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, text = engine.front.inputs, "far too long " * 10_000
    message = {"role": "user", "content": text}
    assert len(token_ids_of(inputs.chat_prompt([message], False))) > 20_000  # to be truncated by the caller
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    for request in (lambda: engine.add_request(text), lambda: inputs.chat_prompt([message])):
        with pytest.raises(PromptTooLongError, match="at least"):
            request()


def test_a_request_id_in_use_is_refused(engine: LLMEngine) -> None:
    engine.add_request("Hi", request_id="mine")
    with pytest.raises(InvalidParameterError, match="already in use"):
        engine.add_request("Hi", request_id="mine")


@pytest.mark.parametrize("name", [5, None, ["mine"], b"mine"])
def test_what_is_no_name_is_not_taken_for_an_unknown_one(engine: LLMEngine, name: Any) -> None:
    with pytest.raises(InvalidParameterError, match="request_id"):
        engine.abort_request(name)


def test_a_request_that_does_not_reach_the_core_leaves_nothing(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, budget = engine.front.client, [0]
    add = client.add

    def run_out(samples: list[EngineCoreRequest]) -> None:
        if not budget[0]:
            raise OSError("no memory for the message")
        budget[0] -= 1
        add(samples)

    with monkeypatch.context() as patch:
        patch.setattr(client, "add", run_out)
        with pytest.raises(OSError, match="no memory"):
            engine.add_request("Hi", request_id="mine")
        assert not engine.has_unfinished_requests()
        budget[0] = 1  # the first of two is running when the second fails
        with pytest.raises(OSError, match="no memory"):
            engine.generate(["Hi", "Hi"], SamplingParams(max_tokens=None, ignore_eos=True))
    assert engine.add_request("Hi", SamplingParams(max_tokens=1), request_id="mine") == "mine"
    assert [output.request_id for output in engine.step()[0]] == ["mine"]
    assert not engine.has_unfinished_requests()


def test_a_users_ids_meet_no_id_of_the_engine(engine: LLMEngine) -> None:
    """Neither those of samples nor the default names."""
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    for name in ("x#0", "request-0", "request-2", "warm-up", "0"):
        engine.add_request("Hi", params, request_id=name)
    engine.add_request("Hi", params.replace(n=2), request_id="x")
    assert engine.add_request("Hi", params) == "request-1"
    assert engine.add_request("Hi", params) == "request-3"
    last = run(engine)
    samples = [sample.token_ids for output in last.values() for sample in output.outputs]
    assert len(last) == 8
    assert len(samples) == 9
    assert len({tuple(token_ids) for token_ids in samples}) == 2  # the second of `x` has a seed of its own


def test_a_misspelt_option_names_the_nearest(fake_executors: list[FakeExecutor]) -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'max_model_len'"):
        LLMEngine("demo", max_model_length=5)
    assert not fake_executors


def test_a_model_may_be_named_by_its_path(fake_executors: list[FakeExecutor]) -> None:
    engine = LLMEngine(demo_model_path(), max_model_len=64)
    assert engine.generate("Hi", SamplingParams(max_tokens=1))[0].finished
    engine.exit()


def test_exit_may_be_called_twice_and_ends_the_engine(engine: LLMEngine, fake_executors: list[FakeExecutor]) -> None:
    engine.exit()
    engine.exit()
    assert fake_executors[0].has_exited
    with pytest.raises(RuntimeError, match="has exited"):
        engine.generate("Hi")


def test_priorities_decide_who_runs_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    order = [RequestPriority.BACKGROUND, RequestPriority.NORMAL, RequestPriority.CRITICAL]
    ids = {engine.add_request("Hi", params, priority=priority): priority for priority in order}
    finished = []
    while engine.has_unfinished_requests():
        finished += [ids[output.request_id] for output in engine.step()[0]]
    assert finished == sorted(order)
