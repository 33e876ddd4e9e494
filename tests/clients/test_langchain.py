"""LangChain, unchanged, under its own standard suite for chat models, by each API that it may speak."""

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from tests.server.http_server import HttpServer

SHARED = {"model": "demo", "temperature": 0, "max_tokens": 40, "max_retries": 0, "api_key": "unused"}
# Of the suite's questions, those whose answers a small model does not know.
TOO_HARD = (
    "test_tool_calling", "test_tool_calling_async", "test_agent_loop", "test_unicode_tool_call_integration",
    "test_structured_output", "test_structured_output_async", "test_structured_output_pydantic_2_v1",
    "test_structured_output_optional_param", "test_json_mode",
)  # fmt: skip


class Suite(ChatModelIntegrationTests):  # type: ignore[misc]  # of any type where it is not installed
    @pytest.fixture(autouse=True)
    def _served(self, server: HttpServer, request: pytest.FixtureRequest) -> None:
        self.url = server.url
        if request.node.originalname in TOO_HARD:
            pytest.skip("the demo model does not know the answer")

    @property
    def has_tool_choice(self) -> bool:
        return True


class TestChat(Suite):
    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**SHARED, "base_url": f"{self.url}/v1", "stream_usage": True}


class TestResponses(TestChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**SHARED, "base_url": f"{self.url}/v1", "use_responses_api": True}


class TestMessages(Suite):
    @property
    def chat_model_class(self) -> Any:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**SHARED, "base_url": self.url}
