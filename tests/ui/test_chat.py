"""The chat as a person uses it: a real server answers where nothing is planted."""

import json
import re
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.server.http_server import HttpServer
from tests.ui.conftest import MakeTab, Tab, until

EVIL = (
    "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script> "
    "[link](javascript:document.title='hacked') <b>bold</b>"
)


def button(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).first.click()


def test_a_question_is_answered_by_the_model_with_figures(tab: Tab) -> None:
    page = tab.page
    tab.page.get_by_label("Max tokens").fill("20")
    tab.send("Hello")
    [answer] = tab.answers()
    assert answer
    assert re.search(r"\d+ tokens · TTFT .* tokens/s", page.locator(".stats").inner_text())
    log = page.get_by_role("log")  # a live region, which speaks when the answer is complete
    assert answer in log.inner_text()
    assert log.get_attribute("aria-live") == "polite"
    assert page.locator("#conversations button").first.inner_text() == "Hello"


def test_shift_enter_makes_a_line_and_what_is_sent_is_what_was_set(tab: Tab) -> None:
    page, bodies = tab.page, tab.answer_with({"reasoning_content": "hm"}, {"content": "Yes *indeed*"})
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill("one")
    box.press("Shift+Enter")
    box.type("two")
    temperature = page.get_by_label("Temperature")
    default = page.evaluate("fetch('ui/about').then((r) => r.json()).then((a) => a.defaults.temperature)")
    assert float(temperature.input_value()) == default
    temperature.fill("0.35")
    page.get_by_label("System prompt").fill("Be brief.")
    box.press("Enter")
    assert tab.answers()[0].endswith("Yes indeed")
    assert page.locator("details.reasoning").get_attribute("open") is None
    tab.send("again")
    until(tab.page, "document.querySelectorAll('.message.assistant').length === 2")
    tab.answers()
    assert bodies[0]["temperature"] == 0.35
    assert "top_p" not in bodies[0]
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "Yes *indeed*"},  # as it was, without its reasoning
        {"role": "user", "content": "again"},
    ]


def test_stop_ends_it_in_the_engine_and_keeps_the_text(tab: Tab, server: HttpServer) -> None:
    page = tab.page
    page.get_by_label("More fields").fill('{"ignore_eos": true, "max_tokens": 4000}')
    tab.send("Tell a long story.")
    until(page, "document.querySelector('.message.assistant .markdown')?.textContent.length > 20")
    page.get_by_role("button", name="Stop", exact=True).click()
    text = tab.answers()[0]
    until(page, "fetch('load').then((r) => r.json()).then((l) => l.server_load === 0)", 1.0)
    expect(page.locator(".note", has_text="Stopped.")).to_be_visible()
    page.reload()
    assert tab.answers()[0] == text


def test_a_reload_in_the_middle_of_an_answer_keeps_its_text(tab: Tab) -> None:
    page = tab.page
    page.get_by_label("More fields").fill('{"ignore_eos": true, "max_tokens": 1900}')
    tab.send("Tell a long story.")
    until(page, "document.querySelector('.message.assistant .markdown')?.textContent.length > 20")
    page.reload()
    assert len(tab.answers()[0]) > 20
    expect(page.locator(".message .problem")).to_contain_text("The page was closed before")
    tab.answer_with({"content": "done"})
    button(page, "Try again")
    page.get_by_text("done", exact=True).wait_for()


def test_edit_and_regenerate_make_branches_that_last(make_tab: MakeTab, tmp_path: Path) -> None:
    tab = make_tab()
    page = tab.open()
    tab.answer_with({"content": "first"})
    tab.send("question")
    assert tab.answers() == ["first"]
    page.unroute_all()
    tab.answer_with({"content": "second"})
    button(page, "Regenerate")
    until(page, "document.body.textContent.includes('2 of 2')")
    assert tab.answers() == ["second"]
    button(page, "Previous")
    assert tab.answers() == ["first"]
    button(page, "Edit")
    page.get_by_label("Edited message").fill("other question")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.message.user').textContent.includes('other question')")
    assert tab.answers() == ["second"]
    page.reload()
    assert page.locator(".message.user .content").inner_text() == "other question"
    button(page, "Previous")
    assert tab.answers() == ["first"]
    button(page, "Next")
    with page.expect_download() as download:
        button(page, "Export")
    download.value.save_as(tmp_path / "export.json")

    other = make_tab()
    page = other.open()
    with page.expect_file_chooser() as chooser:
        button(page, "Import")
    chooser.value.set_files(tmp_path / "export.json")
    page.get_by_role("button", name="question", exact=True).click()
    assert page.locator(".message.user .content").inner_text() == "other question"
    button(page, "Previous")
    assert other.answers() == ["first"]


def test_whatever_a_text_says_it_stays_text(make_tab: MakeTab, tmp_path: Path) -> None:
    tab = make_tab()
    page = tab.open()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": EVIL, "arguments": EVIL}}
    tab.answer_with({"reasoning_content": EVIL}, {"content": EVIL + "\n\n```<b>\n" + EVIL + "\n```\n> > " + EVIL},
                    {"tool_calls": [call]})  # fmt: skip
    tab.send(EVIL)
    tab.answers()
    tab.fail_with(400, EVIL)
    button(page, "Regenerate")
    page.wait_for_selector(".message .problem")
    stored = {"format": "octavo-conversations", "version": 1,
              "conversations": [{"id": "x", "title": EVIL, "updated": 1, "chosen": {}}],
              "messages": [{"id": "m", "conversation": "x", "parent": None, "role": "assistant", "content": EVIL,
                            "created": 1, "error": EVIL, "attachments": [{"kind": "image", "name": EVIL, "url": EVIL}],
                            "tokens": [{"token": EVIL, "logprob": -1, "top": [[EVIL, -1]]}]}]}  # fmt: skip
    (tmp_path / "evil.json").write_text(json.dumps(stored))
    with page.expect_file_chooser() as chooser:
        button(page, "Import")
    chooser.value.set_files(tmp_path / "evil.json")
    page.locator("#conversations button[data-id=x]").click()
    page.wait_for_selector(".token")
    assert page.title() == "Octavo"
    assert page.locator("main img, main script, main b, main a[href^=javascript]").count() == 0


def test_junk_is_refused_in_words(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    for name, text in {
        "not JSON": "{",
        "not an export": "[1]",
        "no valid title": json.dumps(
            {"format": "octavo-conversations", "conversations": [{"id": "x", "title": 3, "updated": 1}], "messages": []}
        ),
    }.items():
        (tmp_path / "junk.json").write_text(text)
        with page.expect_file_chooser() as chooser:
            button(page, "Import")
        chooser.value.set_files(tmp_path / "junk.json")
        expect(page.locator("#problem")).to_contain_text(name)


def test_errors_are_said_and_nothing_is_lost(tab: Tab) -> None:
    page = tab.page
    for status, text in {429: "busy", 503: "cannot answer now"}.items():
        tab.fail_with(status, "because", **{"retry-after": "7"})
        tab.send(f"question {status}")
        problem = page.locator(".message.assistant .problem").last
        expect(problem).to_contain_text(text)
        expect(problem).to_contain_text("Try again in 7 s")
    page.unroute_all()
    tab.answer_with({"content": "part of an "}, end=False)
    button(page, "Try again")
    page.locator(".problem", has_text="The connection broke").wait_for()
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Try again").last.click()
    page.locator(".message .problem", has_text="cannot be reached").wait_for()
    page.unroute_all()
    tab.answer_with({"content": "done"})
    page.get_by_role("button", name="Try again").last.click()
    page.get_by_text("done", exact=True).wait_for()
    page.reload()
    page.locator(".message.user", has_text="question 429").wait_for()


def test_two_tabs_lose_nothing_of_each_other(make_tab: MakeTab) -> None:
    one = make_tab()
    one.open()
    other = make_tab(one.context)
    other.open()
    for tab, text in ((one, "from one"), (other, "from other")):
        tab.answer_with({"content": f"answer {text}"})
        tab.send(text)
        tab.answers()
    for tab in (one, other):
        expect(tab.page.locator("#conversations li")).to_have_count(2)
    one.page.get_by_role("button", name="from other", exact=True).click()
    expect(one.page.locator(".message.assistant .content")).to_have_text("answer from other")
    for tab in (one, other):  # both go on with one conversation
        tab.send("more")
        tab.answers()
    one.page.reload()
    expect(one.page.locator(".message.user", has_text="more")).to_have_count(2)


def test_images_are_attached_and_told_where_the_model_reads_text_only(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    (tmp_path / "dot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
    with page.expect_file_chooser() as chooser:
        button(page, "Attach")
    chooser.value.set_files(tmp_path / "dot.svg")
    expect(page.locator("#problem")).to_contain_text("reads text only")
    about = page.evaluate("fetch('ui/about').then((r) => r.json())")
    page.route("**/ui/about*", lambda route: route.fulfill(json={**about, "takes_images": True}))
    tab.open()
    bodies = tab.answer_with({"content": "A dot."})
    with page.expect_file_chooser() as chooser:
        button(page, "Attach")
    chooser.value.set_files(tmp_path / "dot.svg")
    page.locator("#attachments img").wait_for()
    tab.send("What is it?")
    tab.answers()
    image, text = bodies[0]["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/svg+xml;base64,")
    assert text == {"type": "text", "text": "What is it?"}
    button(page, "Edit")
    button(page, "Remove dot.svg")
    page.get_by_label("Edited message").fill("What is nothing?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.message.user').textContent.includes('nothing')")
    tab.answers()
    assert bodies[1]["messages"][-1]["content"] == "What is nothing?"


def test_tokens_tell_their_probability_and_what_else_there_was(tab: Tab) -> None:
    page = tab.page
    page.get_by_label("Token probabilities").check()
    page.get_by_label("Max tokens").fill("8")
    tab.send("Hello")
    tab.answers()
    page.locator(".token").nth(2).hover()
    assert page.locator(".token-about li").count() == 5
    assert "%" in page.locator(".token-about").inner_text()
    page.locator(".token-text").focus()
    page.keyboard.press("Home")
    expect(page.locator(".token.current")).to_have_attribute("data-at", "0")
    button(page, "Probabilities")
    assert page.locator(".token").count() == 0


def test_a_request_is_copied_as_a_program_without_the_key(make_tab: MakeTab) -> None:
    tab = make_tab(permissions=["clipboard-read", "clipboard-write"])
    page = tab.open()
    tab.answer_with({"content": "ok"})
    page.evaluate("sessionStorage.setItem('octavo-key', 'secret-key')")
    tab.send("it's")
    tab.answers()
    for name, words in {"Copy as curl": ("curl http", "it'\\''s"), "Copy as Python": ("OpenAI(", '"it\'s"')}.items():
        button(page, name)
        until(page, "document.body.textContent.includes('Copied')")
        text = page.evaluate("navigator.clipboard.readText()")
        assert all(word in text for word in words)
        assert "secret-key" not in text
        if name == "Copy as Python":
            compile(text, "snippet", "exec")


def test_tools_are_called_and_answered(tab: Tab) -> None:
    page = tab.page
    call = {
        "index": 0,
        "id": "call-1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    bodies = tab.answer_with({"tool_calls": [call]})
    page.get_by_label("Tools").fill("[{")
    tab.send("How is the weather?")
    expect(page.locator("#problem")).to_contain_text("Tools is not JSON")
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.get_by_role("textbox", name="Message", exact=True).press("Enter")
    page.get_by_label("Result of weather").fill("Rain.")
    page.unroute_all()
    more = tab.answer_with({"content": "It rains."})
    button(page, "Send results")
    page.get_by_text("It rains.").wait_for()
    assert bodies[0]["tools"][0]["function"]["name"] == "weather"
    sent = more[0]["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "call-1", "content": "Rain."}


def test_a_very_long_answer_leaves_the_keyboard_alone(tab: Tab) -> None:
    page = tab.page
    words = [{"content": f"word{number} " + ("\n\n" if number % 40 == 39 else "")} for number in range(20_000)]
    tab.answer_with(*words)
    page.evaluate("""() => {
        window.longest = 0; let last = performance.now();
        const tick = () => { const now = performance.now(); window.longest = Math.max(window.longest, now - last);
                             last = now; setTimeout(tick, 0); };
        tick();
    }""")
    tab.send("long")
    page.get_by_text("word19999").wait_for()
    tab.answers()
    assert page.evaluate("window.longest") < 1000  # on a busy machine; 200 ms on a quiet one


def test_signs_by_the_thousand_do_not_stop_the_page(tab: Tab) -> None:
    for text in ("*a " * 20_000, "[" * 20_000, "> " * 2_000 + "x", "_a_ `" * 8_000):
        tab.page.unroute_all()
        tab.answer_with({"content": text})
        tab.send("signs")
        assert tab.answers()[-1]


def test_a_server_with_a_key_asks_for_it_and_it_stays_in_the_tab(make_tab: MakeTab, locked: HttpServer) -> None:
    tab = make_tab(url=locked.url)
    page = tab.page
    page.goto(locked.url)
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("does not know this key").wait_for()
    page.get_by_label("API key").fill("calm-key")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('p-model').options.length > 0")
    page.get_by_label("Max tokens").fill("8")
    tab.send("x")
    tab.answers()
    assert page.evaluate("Object.values(localStorage).join() + location.href").find("calm-key") < 0
    assert page.evaluate("sessionStorage.getItem('octavo-key')") == "calm-key"
    with page.expect_download() as download:
        button(page, "Export")
    assert "calm-key" not in download.value.path().read_text()
