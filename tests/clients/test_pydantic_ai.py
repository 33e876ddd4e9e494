"""pydantic-ai, unchanged: agents that call tools, give typed results, and stream."""

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from tests.clients.words import ADA, FORECAST, MODEL, Person
from tests.server.http_server import HttpServer

GREEDY = ModelSettings(temperature=0.0)


@pytest.fixture
def model(server: HttpServer) -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="unused"))


async def test_an_answer(model: OpenAIChatModel) -> None:
    result = await Agent(model, model_settings=GREEDY).run("What is a block?")
    assert result.output
    assert result.usage.output_tokens > 0


async def test_an_agent_runs_its_tool_and_tells_the_result(model: OpenAIChatModel) -> None:
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return FORECAST

    result = await Agent(model, tools=[get_weather], model_settings=GREEDY).run("What is the weather in Rome?")
    assert asked == ["Rome"]
    assert "21" in result.output


async def test_a_typed_result_by_schema(model: OpenAIChatModel) -> None:
    agent = Agent(model, output_type=NativeOutput(Person), model_settings=GREEDY)
    result = await agent.run("JSON please: name Ada, age 36, city Rome")
    assert result.output == ADA


async def test_a_typed_result_by_a_required_tool(model: OpenAIChatModel) -> None:
    agent = Agent(model, output_type=Person, model_settings=GREEDY)
    result = await agent.run("JSON please: name Ada, age 36, city Rome")
    assert isinstance(result.output, Person)


async def test_a_streamed_answer(model: OpenAIChatModel) -> None:
    agent = Agent(model, model_settings=GREEDY)
    async with agent.run_stream("What is a block?") as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == (await agent.run("What is a block?")).output
    assert len(pieces) > 1
