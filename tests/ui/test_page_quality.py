"""The page on a phone and at a desk, in dark and light: contrast, keyboard, names, policy, pictures."""

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.server.http_server import HttpServer
from tests.ui.conftest import DESKTOP, PHONE, MakeTab, Tab

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
        Path(PICTURES).mkdir(exist_ok=True)
        page.screenshot(path=f"{PICTURES}/{name}.png")


def check(page: Page) -> None:
    assert page.evaluate(f"({CHECKS}).lowContrast()") == []
    assert page.evaluate(f"({CHECKS}).nameless()") == []
    assert page.evaluate(OVERFLOW) <= 0


def converse(tab: Tab) -> None:
    tab.answer_with({"reasoning_content": "They want a plan.\nShort."}, {"content": MARKDOWN})
    tab.send("How do I fold a sheet eight times?")
    tab.answers()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_chat_reads_well(make_tab: MakeTab, scheme: str, size: dict[str, int]) -> None:
    tab = make_tab(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = tab.open()
    check(page)
    picture(page, f"empty-{scheme}-{size['width']}")
    converse(tab)
    page.locator("details.reasoning summary").click()
    check(page)
    page.locator("#scroller").evaluate("(node) => { node.scrollTop = 0; }")
    picture(page, f"chat-{scheme}-{size['width']}")
    if size is PHONE:
        page.get_by_role("button", name="Parameters").click()
        check(page)
        picture(page, f"parameters-{scheme}")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Parameters")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_engine_reads_well(make_tab: MakeTab, busy: HttpServer, scheme: str, size: dict[str, int]) -> None:
    tab = make_tab(viewport=size, color_scheme=scheme, url=busy.url)
    page = tab.open("/#engine")
    page.get_by_text("All rows are taken").first.wait_for()
    page.wait_for_selector("tr.waits")
    page.wait_for_timeout(3000)  # so that there is something to plot
    page.locator("table.requests button").last.click()
    page.locator(".timeline-list li").first.wait_for()
    check(page)
    picture(page, f"engine-{scheme}-{size['width']}")
    page.locator("#engine").evaluate("(node) => { node.scrollTop = node.scrollHeight / 3; }")
    picture(page, f"engine-more-{scheme}-{size['width']}")


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
