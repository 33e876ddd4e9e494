"""openai-agents in its default mode, which asks `/v1/responses`: a tool is run, a form is kept, a stream is read."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.clients.words import ADA, MODEL, Person

agents: Any = pytest.importorskip("agents")
GREEDY = agents.ModelSettings(temperature=0)


@pytest.fixture(autouse=True)
def default_client(async_client: AsyncOpenAI) -> None:
    agents.set_default_openai_client(async_client, use_for_tracing=False)
    agents.set_tracing_disabled(True)


def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"temperature": 21, "sky": "sunny"}'


async def test_a_tool_is_run() -> None:
    agent = agents.Agent(name="a", model=MODEL, tools=[agents.function_tool(get_weather)], model_settings=GREEDY)
    result = await agents.Runner.run(agent, "What is the weather in Rome?")
    assert "21" in result.final_output


async def test_a_stream() -> None:
    agent = agents.Agent(name="a", model=MODEL, model_settings=GREEDY)
    result = agents.Runner.run_streamed(agent, "What is a block?")
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "response.output_text.delta" in kinds
    assert result.final_output


async def test_a_form() -> None:
    agent = agents.Agent(name="a", model=MODEL, output_type=Person, model_settings=GREEDY)
    result = await agents.Runner.run(agent, "JSON please: name Ada, age 36, city Rome")
    assert result.final_output == ADA
