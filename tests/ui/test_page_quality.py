"""The page on a phone and at a desk, in dark and light: contrast, keyboard, names, policy, pictures."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, ViewportSize, expect
from tests.server.http_server import HttpServer
from tests.ui.conftest import DESKTOP, PHONE, MakeTab, Tab, until
from tests.ui.test_engine import asking, story

MARKDOWN = """## A plan

1. Read `structure.md`
2. Change **one** thing, *then* test

```python
def fold(leaf: str) -> str:
    return leaf * 8  # an octavo
```

| sheet | leaves |
| --- | --- |
| folio | 2 |
| octavo | 8 |

> Blocks are *reused*. See <https://example.org>.
"""
CHECKS = Path(__file__).with_name("checks.js").read_text()
OVERFLOW = "() => document.documentElement.scrollWidth - innerWidth"
PICTURES = os.environ.get("PICTURES")  # a folder to keep them in


def picture(page: Page, name: str) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{PICTURES}/{name}.png")


def check(page: Page) -> None:
    assert page.evaluate(f"({CHECKS}).lowContrast()") == []
    assert page.evaluate(f"({CHECKS}).nameless()") == []
    assert page.evaluate(OVERFLOW) <= 0


def converse(tab: Tab) -> None:
    tab.answer_with({"reasoning_content": "They want a plan.\nShort."}, {"content": MARKDOWN})
    tab.send("How do I fold a sheet eight times?")
    tab.answers()


SCHEMES, SIZES = ("light", "dark"), (DESKTOP, PHONE)


def looks(page: Page) -> Iterator[str]:
    """Show the page at a desk and on a phone, in light and dark: yield a name for each."""
    for size, scheme in itertools.product(SIZES, SCHEMES):
        page.set_viewport_size(ViewportSize(width=size["width"], height=size["height"]))
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        yield f"{scheme}-{size['width']}"


def test_the_chat_reads_well(tab: Tab) -> None:
    page = tab.page
    for name in looks(page):
        check(page)
        picture(page, f"empty-{name}")
    converse(tab)
    page.locator("details.reasoning summary").click()
    for name in looks(page):
        check(page)
        page.locator("#scroller").evaluate("(node) => { node.scrollTop = 0; }")
        picture(page, f"chat-{name}")
    page.get_by_role("button", name="Parameters").click()  # on a phone it covers the chat
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        check(page)
        picture(page, f"parameters-{scheme}")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Parameters")).to_be_focused()


def test_the_engine_reads_well(make_tab: MakeTab, narrow: HttpServer) -> None:
    page = make_tab(url=narrow.url).open("/#engine")
    with asking(narrow, *(story(60 * number) for number in range(10))):
        page.get_by_text("All rows are taken").first.wait_for()
        page.locator("table.requests button").last.click()
        page.locator(".timeline-list li").first.wait_for()
        until(page, "document.querySelector('.plots path').getAttribute('d').split('L').length > 8")
        for name in looks(page):
            check(page)
            page.locator("#engine").evaluate("(node) => { node.scrollTop = 0; }")
            picture(page, f"engine-{name}")
            page.locator("#engine").evaluate("(node) => { node.scrollTop = node.scrollHeight / 3; }")
            picture(page, f"engine-more-{name}")


def test_the_keyboard_reaches_all_and_focus_is_seen(tab: Tab) -> None:
    page = tab.page
    converse(tab)
    wanted = set(page.evaluate(f"({CHECKS}).reachable()"))
    reached: set[Any] = set()
    for _ in range(3 * len(wanted)):
        page.keyboard.press("Tab")
        at, outline = page.evaluate("""() => [document.activeElement.dataset.at ?? '',
            getComputedStyle(document.activeElement).outlineStyle]""")
        if at:
            assert outline != "none", page.evaluate("document.activeElement.outerHTML")
            reached.add(at)
    assert wanted <= reached
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Engine")).to_have_attribute("aria-selected", "true")
    page.get_by_text("Nothing waits").or_(page.get_by_text("The engine is idle")).first.wait_for()


def test_the_policy_holds(tab: Tab) -> None:
    page = tab.page
    ran = page.evaluate("""() => new Promise((resolve) => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        fetch('https://example.org/').then(() => resolve('fetched'), () => resolve(window.ran ?? 'held'));
    })""")
    assert ran == "held"
    assert len(tab.problems) >= 2  # both are told
    assert all("Content Security Policy" in each or "https://example.org" in each for each in tab.problems)
    tab.problems.clear()
