"""The quickstarts as a user types them, on the bundled model."""

import pytest
import torch

from octavo import LLM, AsyncLLMEngine, LLMEngine, ModelRunner, SamplingParams


def test_llm() -> None:
    outputs = LLM(model_name="demo", device="auto").generate("Hello, world!")
    assert isinstance(outputs, list)
    assert len(outputs) == 1
    assert outputs[0].finished
    assert 1 <= len(outputs[0].outputs[0].token_ids) <= 16


def test_llm_engine() -> None:
    outputs = LLMEngine(model_name="demo", device="auto").generate(["Hello", "World"])
    assert [output.prompt for output in outputs] == ["Hello", "World"]


def test_model_runner() -> None:
    runner = ModelRunner(model_name="demo", device="auto")
    input_tokens = runner.tokenize("Hello, world!")
    output = runner.run_model(input_tokens)
    assert output.logits.shape[0] == len(input_tokens)
    assert output.logits.dtype == torch.float32
    assert output.logits.isfinite().all()


async def test_async_llm_engine() -> None:
    engine = AsyncLLMEngine()
    outputs = await engine.generate_async(["Hello", "World"])
    assert [output.prompt for output in outputs] == ["Hello", "World"]
    engine.exit()


def test_an_engine_driven_by_hand() -> None:
    engine = LLMEngine("demo")
    engine.add_request("Hi", SamplingParams())
    outputs, num_tokens = engine.step()
    assert len(outputs) == 1
    assert num_tokens == len(outputs[0].prompt_token_ids)
    assert len(outputs[0].outputs[0].token_ids) == 1
    engine.exit()


def test_chat_answers_one_conversation_or_many() -> None:
    conversation = [{"role": "user", "content": "What is 2 + 3?"}]
    with LLM("demo", dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        single = llm.chat(conversation, params)
        both = llm.chat([conversation, [{"role": "user", "content": "Hello"}]], params)
    assert len(single) == 1
    assert single[0].outputs[0].finish_reason == "stop"
    assert single[0].text == both[0].text


@pytest.mark.parametrize("model_class", [LLM, LLMEngine])
def test_exit_twice_is_once(model_class: type[LLM] | type[LLMEngine]) -> None:
    model = model_class("demo")
    model.exit()
    model.exit()
