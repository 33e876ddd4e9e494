"""Clients in JavaScript, unchanged: OpenAI's and Anthropic's packages, and Vercel's AI SDK with its providers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.http_server import HttpServer

CHECKS = Path(__file__).parent / "node/checks.mjs"
PACKAGES = Path(sys.prefix) / "node"  # where `make test-clients` has installed them
NODE = Path(sys.prefix) / "bin/node"


@pytest.fixture(scope="module")
def faults(server: HttpServer) -> dict[str, str | None]:
    """What went wrong in each check, all of them in one process: it takes a second to read the packages."""
    program = shutil.copy(CHECKS, PACKAGES)  # where it finds them
    ran = subprocess.run([NODE, program, server.url], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str | None] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "openai chat", "openai chat, tools and forms", "openai responses", "openai responses in the background",
        "openai responses, tools and forms", "openai, the rest", "anthropic", "anthropic, tools and thoughts",
        "ai, openai, responses", "ai, openai, chat", "ai, openai-compatible", "ai, anthropic", "ai, the rest",
    ],
)  # fmt: skip
def test_a_client(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None, faults[name]
