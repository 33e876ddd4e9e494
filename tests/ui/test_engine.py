"""Why is my request slow? The page says it, in words, for each of the causes that are planted here."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect
from tests.server.http_server import HttpServer
from tests.ui.conftest import MakeTab, until

CHAT = "/v1/chat/completions"
MINE = "mine"  # the request of the person who looks
ENDLESS = {"max_tokens": 1900, "ignore_eos": True}
# What the table has said of a request since somebody looks: a cause may last less than a second here.
RECORD = """() => {
    window.said = {why: []};
    new MutationObserver(() => {
        window.said.why.push(document.getElementById("why").innerText);
        for (const row of document.querySelectorAll("table.requests tbody tr")) {
            (window.said[row.cells[0].innerText] ??= []).push(row.innerText);
        }
    }).observe(document.getElementById("engine"), {subtree: true, childList: true, characterData: true});
}"""


def story(words: int = 1, **fields: object) -> dict[str, Any]:
    """A chat whose prompt has about `words` tokens, none of them cached."""
    return {"messages": [{"role": "user", "content": f"{next(NUMBERS)} begins: " + "a " * words}], **ENDLESS, **fields}


NUMBERS = itertools.count(1000)


@contextmanager
def asking(server: HttpServer, *bodies: dict[str, Any], key: str = "-", name: str | None = None) -> Iterator[None]:
    """Ask these, each over a connection of its own, and leave at the end of the block: the engine aborts them."""
    address = urlsplit(server.url)
    with ExitStack() as stack:
        for body in bodies:
            data = json.dumps({**body, "stream": True}).encode()
            head = [f"POST {CHAT} HTTP/1.1", "Host: here", f"X-Api-Key: {key}", "Content-Type: application/json"]
            head += [f"Content-Length: {len(data)}", *([f"X-Request-Id: {name}"] if name else []), "", ""]
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            connection.sendall("\r\n".join(head).encode() + data)
        yield


def in_flight(server: HttpServer, count: int) -> None:
    while server.client.get("/load").json()["server_load"] != count:
        assert server.process.poll() is None
        time.sleep(0.02)


def watch(make_tab: MakeTab, server: HttpServer, key: str = "") -> Page:
    """Open the engine's view, and keep what it says."""
    in_flight(server, 0)
    tab = make_tab(url=server.url)
    if key:
        tab.page.add_init_script(f"sessionStorage.setItem('octavo-key', '{key}')")
    page = tab.open("/#engine")
    page.get_by_text("The engine is idle").wait_for()
    page.evaluate(RECORD)
    return page


def said(page: Page, words: str, of: str = MINE) -> None:
    until(page, f"window.said['{of}']?.some((text) => text.includes('{words}'))")


def test_all_rows_are_taken(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = watch(make_tab, narrow)
    with asking(narrow, *(story() for _ in range(8))):
        in_flight(narrow, 8)
        with asking(narrow, story(), name=MINE):
            said(page, "1 request waits: All rows are taken.", of="why")
            said(page, "at most")  # until one of the others reaches its limit of tokens
    in_flight(narrow, 0)
    row = page.locator("tr.ended", has_text=MINE)  # who has given up can still be asked
    expect(row).to_contain_text("All rows are taken")
    row.get_by_role("button").click()
    expect(page.locator(".timeline")).to_contain_text(f"{MINE}: ended after")
    expect(page.locator(".timeline-list")).to_contain_text("rows")


def test_no_blocks_are_free(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = watch(make_tab, narrow)
    with asking(narrow, story(1800)), asking(narrow, story(1200), name=MINE):
        said(page, "No free KV blocks (needs ")


def test_a_long_prompt_is_before_it(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = watch(make_tab, narrow)
    with asking(narrow, story(1800)), asking(narrow, story(100), name=MINE):
        said(page, "Long prompt before it")
    expect(page.locator("tr.ended", has_text=MINE)).to_contain_text("Long prompt before it")


def test_its_grammar_is_compiling(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = watch(make_tab, narrow)
    texts = {f"field{at}": {"type": "string", "pattern": f"^[a-z]{{1,{20 + at % 9}}}x{at}$"} for at in range(3000)}
    schema = {"type": "object", "properties": texts, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}
    with asking(narrow, story(response_format=form), name=MINE):
        said(page, "Its grammar is compiling")


def test_its_tenant_is_over_its_share(make_tab: MakeTab, locked: HttpServer) -> None:
    page = watch(make_tab, locked, key="calm-key")
    number_waiting = page.get_by_role("region", name="Keys").locator("tr", has_text="busy").locator("td").nth(2)
    with asking(locked, *(story() for _ in range(8)), key="busy-key"):
        expect(number_waiting).to_have_text("5")  # three have rows, and one is kept free for the other key
        with asking(locked, story(), key="busy-key", name=MINE):
            said(page, "5 of this key before it")
            said(page, "Fair share: busy has more than others", of="why")


def test_what_can_never_fit_is_told_from_not_now(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = watch(make_tab, narrow)
    assert narrow.post(CHAT, story(4000)).status_code == 400
    expect(page.get_by_role("region", name="Rejected, by cause")).to_contain_text("can never fit")
