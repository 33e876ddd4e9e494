"""A real server, and a headless Chromium that looks at its page.

These tests run in an environment of their own (`make test-ui`). The server is started with the interpreter of the
repository's `.venv`; the browser is the one that the system has.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, sync_playwright
from tests.server.http_server import HttpServer

SERVER_PYTHON = str(Path(__file__).parents[2] / ".venv/bin/python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def server() -> Iterator[HttpServer]:
    with HttpServer("--max-num-seqs", "4", python=SERVER_PYTHON) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "these tests need Chromium: apt install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def until(page: Page, expression: str, timeout_s: float = 10.0) -> None:
    """Wait until a script is true. Playwright's own way needs `eval` on the page, which the policy forbids."""
    end_s = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, expression
        page.wait_for_timeout(20)


class Tab:
    """A page, and what has gone wrong on it: errors of scripts, of the policy, and requests to elsewhere."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context, self.url = context, url
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("request", lambda request: self._check_address(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(f"{message.type}: {message.text}")

    def _check_address(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"request to {url}")

    def open(self, path: str = "/") -> Page:
        self.page.goto(self.url + path)
        until(self.page, "document.getElementById('p-model')?.options.length > 0")
        return self.page

    def answer_with(self, *deltas: dict[str, Any], end: bool = True, **top: Any) -> list[dict[str, Any]]:
        """Let the server answer with these deltas, once more for each request; return the requests' bodies."""
        bodies: list[dict[str, Any]] = []
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None, **top}]} for delta in deltas]
        if end:
            chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if end else "")

        def fulfill(route: Route) -> None:
            bodies.append(route.request.post_data_json)
            route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=text)

        self.page.route("**/v1/chat/completions", fulfill)
        return bodies

    def fail_with(self, status: int, message: str, **headers: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": "x"}})
        headers["content-type"] = "application/json"
        self.page.unroute_all()
        self.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(status=status, headers=headers, body=body)
        )

    def send(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def answers(self) -> list[str]:
        """The texts of the answers on the page, when all are complete."""
        self.page.wait_for_selector(".message.assistant[aria-busy=false]")
        until(self.page, "!document.querySelector('[aria-busy=true]')")
        return [each.inner_text() for each in self.page.locator(".message.assistant .content").all()]


MakeTab = Callable[..., Tab]


@pytest.fixture
def make_tab(browser: Browser, server: HttpServer) -> Iterator[MakeTab]:
    """Return what opens tabs; a new context is a new browser profile."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []

    def make(context: BrowserContext | None = None, url: str = server.url, **options: Any) -> Tab:
        if context is None:
            context = browser.new_context(**{"viewport": DESKTOP, **options})
            context.set_default_timeout(10_000)
            contexts.append(context)
        tabs.append(Tab(context, url))
        return tabs[-1]

    yield make
    problems = [problem for tab in tabs for problem in tab.problems]
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def tab(make_tab: MakeTab) -> Tab:
    made = make_tab()
    made.open()
    return made


@pytest.fixture(scope="session")
def narrow() -> Iterator[HttpServer]:
    """A server that has little of everything, so that requests wait."""
    flags = ("--max-num-seqs", "8", "--num-kv-blocks", "96", "--max-num-batched-tokens", "64")
    with HttpServer(*flags, python=SERVER_PYTHON) as running:
        yield running
        assert "Traceback" not in running.log


KEYS = """
tenants:
  - {name: busy, keys: [busy-key]}
  - {name: calm, keys: [calm-key]}
"""


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server with keys."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(KEYS)
    flags, key = ("--keys-file", str(file), "--max-num-seqs", "4"), {"x-api-key": "calm-key"}
    with HttpServer(*flags, python=SERVER_PYTHON, headers=key) as running:
        yield running
        assert not any(text in running.log for text in ("Traceback", "busy-key", "calm-key"))
