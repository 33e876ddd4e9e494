"""One server with the demo model, and official clients of it.

These tests run in an environment of their own, where Octavo is not installed (`make test-clients`): they know it over
HTTP only. The server is started with the interpreter of the repository's `.venv`.
"""

import inspect
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

# Read when it is imported: without it, LiteLLM asks the internet for prices first.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import pytest
from openai import AsyncOpenAI, OpenAI
from tests.server.http_server import HttpServer
from tests.server.proxies import nginx

SERVER_PYTHON = str(Path(__file__).parents[2] / ".venv/bin/python")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let LangChain's tests share one event loop: its models share connections."""
    for item in items:
        if item.path.name == "test_langchain.py" and inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    state_dir = str(tmp_path_factory.mktemp("state"))
    with HttpServer("--max-temperature", "5", "--state-dir", state_dir, python=SERVER_PYTHON) as running:
        if os.environ.get("CLIENTS_THROUGH") == "nginx":  # the same tests, with nginx in between
            with nginx(running, tmp_path_factory.mktemp("nginx")) as running.url:
                yield running
        else:
            yield running
        assert "Traceback" not in running.log


@pytest.fixture
def client(server: HttpServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
