"""Why is my request slow? The page says it, in words, for each of the causes that are planted here."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
from playwright.sync_api import expect
from tests.server.http_server import HttpServer
from tests.ui.conftest import SERVER_PYTHON, MakeTab, Tab

CHAT = "/v1/chat/completions"


@contextmanager
def asking(server: HttpServer, *bodies: tuple[str, dict[str, object]]) -> Iterator[None]:
    """Ask these with these keys, each from a connection of its own, until the end of the block."""
    clients = [httpx.Client(base_url=server.url, timeout=60.0) for _ in bodies]

    def ask(client: httpx.Client, key: str, body: dict[str, object]) -> None:
        try:
            client.post(CHAT, json=body, headers={"x-api-key": key})
        except (httpx.HTTPError, RuntimeError):
            return  # closed at the end of the block

    for client, (key, body) in zip(clients, bodies, strict=True):
        threading.Thread(target=ask, args=(client, key, body), daemon=True).start()
    try:
        yield
    finally:
        server.process.kill()
        for client in clients:
            client.close()


def chat(content: str, **fields: object) -> dict[str, object]:
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 3000, "ignore_eos": True, **fields}


def engine_view(make_tab: MakeTab, server: HttpServer, key: str = "") -> Tab:
    tab = make_tab(url=server.url)
    if key:
        tab.page.add_init_script(f"sessionStorage.setItem('octavo-key', '{key}')")
    tab.open("/#engine")
    return tab


def test_rows_and_blocks_that_are_taken(make_tab: MakeTab) -> None:
    stories = [("", chat(f"story {number}")) for number in range(4)]
    with HttpServer("--max-num-seqs", "2", python=SERVER_PYTHON) as server, asking(server, *stories):
        page = engine_view(make_tab, server).page
        expect(page.locator("#why")).to_contain_text("2 requests wait: All rows are taken.")
        expect(page.locator("tr.waits").first).to_contain_text("at most")
    flags = ("--num-kv-blocks", "64", "--max-model-len", "1024")
    texts = [("", chat(f"{number} " * 300, max_tokens=200)) for number in range(5)]
    with HttpServer(*flags, python=SERVER_PYTHON) as server, asking(server, *texts):
        page = engine_view(make_tab, server).page
        expect(page.locator("#why")).to_contain_text("No free KV blocks")


def test_a_tenant_over_its_share(make_tab: MakeTab, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("tenants:\n  - {name: busy, keys: [b]}\n  - {name: calm, keys: [c]}\n")
    flags = ("--keys-file", str(tmp_path / "keys.yaml"), "--max-num-seqs", "4")
    stories = [("b", chat(f"story {number}")) for number in range(8)]
    with HttpServer(*flags, python=SERVER_PYTHON) as server, asking(server, *stories):
        page = engine_view(make_tab, server, "c").page
        expect(page.locator("#why")).to_contain_text("Fair share: busy has more than others")
        row = page.get_by_role("region", name="Keys").locator("tr", has_text="busy")
        expect(row).to_contain_text("5")  # wait here
