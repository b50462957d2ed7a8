"""Campaign: drive the server's page in a browser, with the engine of tests/serve/fake_engine.py.

    make campaign-page

It needs playwright (`pip install playwright`) and Chromium, as `chromium` in PATH or in the
environment variable `CHROMIUM`. If axe-core-python is installed, it also checks accessibility.
"""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serve.raw import fake_server

pytestmark = pytest.mark.campaign
api = pytest.importorskip("playwright.sync_api")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SIZES = {"wide": {"width": 1200, "height": 800}, "narrow": {"width": 360, "height": 700}}


@pytest.fixture(scope="module")
def address():
    with fake_server(places=8) as (address, _):
        yield address


@pytest.fixture
def visit(browser):
    """A function that opens an address in a fresh profile. Errors of the page fail the test."""
    problems, contexts = [], []

    def open(address, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: "Policy" in line.text and problems.append(line.text))
        page.goto(address)
        expect(page.locator("#facts")).to_have_text("context 4,096 tokens")
        return page

    yield open
    for context in contexts:
        context.close()
    assert problems == []


def expect(locator):
    return api.expect(locator)


def control(page, name):
    """The last control of this name below a message."""
    return page.locator(f"[data-control$=' {name}']").last


def is_done(page):
    expect(page.locator("#send")).not_to_have_text("Stop")


def say(page, text, kind="chat", tokens=40):
    """Send a message of a new conversation."""
    page.click(f"#new-{kind}")
    limit(page, tokens)
    page.fill("#draft", text)
    page.keyboard.press("Enter")


def limit(page, tokens):
    page.click("#open-settings")
    page.get_by_label("Max tokens").fill(str(tokens))
    page.click("#settings button.main")


def versions(page):
    """The versions shown of each message that has several, such as `1/2`."""
    return re.findall(r"\d+/\d+", " ".join(page.locator(".versions").all_inner_texts()))


def test_versions_and_conversations_survive_a_reload(visit, address):
    page = visit(address)
    say(page, "hello")
    is_done(page)
    reply = page.locator("article.assistant .body")
    expect(reply).to_have_text("User: hello Assistant:User: hello Assist")
    stats = page.locator(".stats")
    expect(stats).to_have_text(re.compile(r"40 tokens · [\d,]+ tokens/s · first after \d+ ms"))
    expect(page.locator("#context")).to_have_text("context 62 of 4,096 tokens")
    control(page, "regenerate").click()
    is_done(page)
    control(page, "edit").click()
    page.get_by_label("Edit the message").fill("bye")
    page.keyboard.press("Enter")
    is_done(page)
    expect(reply).to_contain_text("User: bye")
    assert versions(page) == ["2/2"]
    control(page, "older").click()
    expect(reply).to_contain_text("User: hello")
    assert versions(page) == ["1/2", "2/2"]
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the conversation").fill("greetings")
    page.keyboard.press("Enter")
    page.reload()
    expect(reply).to_contain_text("User: hello")
    expect(page.locator("#list li")).to_have_text(re.compile("greetings"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "greetings.json"
    exported = json.loads(download.value.path().read_text())
    assert len(exported["messages"]) == 5
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#list li")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#list li")).to_have_count(1)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_reply_continues_from_an_alternative(visit, address, kind):
    page = visit(address)
    page.click("#tokens")
    say(page, "abcdef", kind, tokens=8)
    is_done(page)
    reply = page.locator("article.assistant .body")
    first = "abcdefab" if kind == "text" else "User: ab"
    expect(reply).to_have_text(first)
    expect(page.locator(".token")).to_have_count(8)
    page.locator(".token").nth(2).hover()
    expect(page.locator("#tip")).to_contain_text("75.0 %")
    page.mouse.move(5, 500)
    expect(page.locator("#tip")).to_be_hidden()
    page.locator(".token").first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Enter"):  # the second token, as `*`
        page.keyboard.press(key)
    is_done(page)
    expect(reply).to_have_text("a*abcdefa*" if kind == "text" else "U*User: ab")
    assert versions(page) == ["2/2"]
    expect(page.locator(".token")).to_have_count(10)


def test_replies_are_formatted_but_never_read_as_html(visit, address):
    page = visit(address)
    hostile = "<img src=x onerror=alert(1)> **b** [l](javascript:alert(1)) [m](https://a.example)"
    blocks = "- one\n  - two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx<1\n```"
    say(page, f"{hostile}\n\n{blocks}", tokens=160)
    is_done(page)
    reply = page.locator("article.assistant .body")
    expect(reply).to_contain_text("<img src=x onerror=alert(1)>")
    for tag, number in {"img": 0, "strong": 1, "a": 1, "li li": 1, "td": 2, "pre code": 1}.items():
        expect(reply.locator(tag)).to_have_count(number)
    expect(reply.locator("pre")).to_have_text("x<1")
    expect(reply.get_by_role("button", name="Copy the code")).to_be_visible()
    page.click("#raw")
    expect(reply).to_contain_text("**b**")


def test_the_keyboard_is_enough(visit, address):
    page = visit(address)
    say(page, "line", tokens=4000)
    page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_contain_text("stopped")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#draft")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#draft")).to_have_value("one\ntwo")
    page.click("#open-help")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()


def test_a_reply_continues_while_another_conversation_is_shown(visit, address):
    page = visit(address)
    say(page, "first", tokens=1000)
    page.click("#new-text")
    expect(page.locator("#send")).to_have_text("Stop")
    is_done(page)
    page.get_by_role("button", name="first").click()
    expect(page.locator(".stats")).to_contain_text("1,000 tokens")
    control(page, "regenerate").press("Enter")
    expect(page.locator("#log")).to_be_focused()


def test_errors_are_explained_and_can_be_repeated(visit):
    with fake_server(step=0.01, max_sequences=1, places=1) as (address, _):
        page = visit(address)
        say(page, "!", "text")
        error = page.locator(".error")
        expect(error).to_contain_text("The model failed")
        say(page, "#", "text")
        expect(error).to_contain_text(re.compile("ended unexpectedly"))
        again = error.get_by_role("button")
        expect(again).to_have_text(re.compile(r"Try again \(better in \d s\)"))
        while not page.request.get(f"{address}/ready").ok:
            page.wait_for_timeout(100)
        other = visit(address)
        say(other, "long", "text", 3000)
        expect(other.locator("article.assistant .body")).to_contain_text("longlong")
        say(page, "short", "text", 10)
        expect(error).to_contain_text("The server is busy.")
        other.keyboard.press("Escape")
        is_done(other)
        again.click()
        expect(page.locator("article.assistant .body")).to_have_text("shortshort")
        expect(error).to_have_count(0)
        say(page, "lost", "text", 3000)
        expect(page.locator("article.assistant .body")).to_contain_text("lostlost")
    expect(error).to_contain_text("The connection ended before the reply did.")
    again.click()
    expect(error).to_contain_text("The server cannot be reached.")


def test_a_key_and_a_path_prefix(visit):
    with fake_server(key="secret-key") as (address, _):
        prefixed = f"{address}/some/prefix/"

        def proxy(route):
            answer = route.fetch(url=route.request.url.replace("/some/prefix", ""))
            route.fulfill(response=answer)

        page = visit(address, http_credentials={"username": "any", "password": "secret-key"})
        page.route("**/some/prefix/**", proxy)
        page.goto(prefixed)
        say(page, "hello")
        is_done(page)
        expect(page.locator("article.assistant .body")).to_contain_text("User: hello")
        visit(address.replace("://", "://any:secret-key@"))  # `fetch` refuses such addresses


def test_an_empty_message_cannot_be_sent(visit, address):
    page = visit(address)
    page.click("#new-chat")
    expect(page.locator("#draft")).to_have_attribute("placeholder", re.compile("not trained"))
    for text, is_enabled in (("", False), (" ", False), ("a", True), ("", False)):
        page.fill("#draft", text)
        expect(page.locator("#send")).to_be_enabled(enabled=is_enabled)
    say(page, "a", "text")
    is_done(page)
    expect(page.locator("#send")).to_be_enabled()  # continues the text


def test_a_full_storage_is_reported(visit, address):
    page = visit(address)
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 2000))")
    page.click("#tokens")
    say(page, "hello", tokens=200)
    is_done(page)
    expect(page.locator("#notice")).to_contain_text("storage is full")
    expect(page.locator("article.assistant .body")).to_contain_text("User: hello")


class Checks:
    """Checks a state of the page, and takes a screenshot if `SCREENSHOTS` names a folder."""

    def __init__(self, page, name):
        self.page, self.name = page, name
        package = find_spec("axe_core_python")
        self.axe = package and Path(str(package.origin)).with_name("axe.min.js").read_text()

    def __call__(self, state):
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{state}-{self.name}.png")
        widths = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], state
        if self.axe:
            self.page.evaluate(self.axe)
            found = self.page.evaluate("rules => axe.run({runOnly: rules})", RULES)["violations"]
            assert [(one["id"], one["nodes"][0]["target"]) for one in found] == [], state


@pytest.fixture
def checked(request, visit, address):
    """A page of some size and colors, and its checks."""
    scheme, size = request.param
    page = visit(address, viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")
    return page, Checks(page, f"{scheme}-{size}")


looks = pytest.mark.parametrize(
    "checked", [(scheme, size) for scheme in ("light", "dark") for size in SIZES], indirect=True
)


def open_list(page):
    if page.locator("#open-list").is_visible():
        page.click("#open-list")


@looks
def test_chats_fit_and_are_accessible(checked):
    page, check = checked
    open_list(page)
    page.click("#new-chat")
    check("empty chat")
    limit(page, 150)
    page.fill("#draft", "**bold** `code`\n\n- one\n- two\n\n> quote\n\n```py\nprint(1)\n```\n")
    page.keyboard.press("Enter")
    is_done(page)
    check("chat")
    page.click("#tokens")
    control(page, "regenerate").click()
    is_done(page)
    check("tokens")
    page.locator(".token").first.focus()
    check("tip")
    page.keyboard.press("Escape")
    control(page, "edit").click()
    check("edit")


@looks
def test_other_states_fit_and_are_accessible(checked):
    page, check = checked
    check("empty text")
    page.fill("#draft", "!")
    page.keyboard.press("Enter")
    expect(page.locator(".error")).to_be_visible()
    check("error")
    open_list(page)
    check("list")
    page.click("#new-chat")
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    check("settings")
    page.keyboard.press("Escape")
    page.click("#open-help")
    check("help")


def test_reasoning_is_shown_above_the_reply(visit, address):
    page = visit(address)
    parts = [{"reasoning_content": "<b>Hm</b>"}, {"content": "Yes."}]
    choices = [{"index": 0, "delta": one, "logprobs": None, "finish_reason": None} for one in parts]
    choices[1]["finish_reason"] = "stop"
    events = [f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices]
    body = "".join([*events, "data: [DONE]\n\n"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=body, headers={"Content-Type": "text/event-stream"}
    ))  # fmt: skip
    say(page, "hello")
    is_done(page)
    expect(page.locator("article.assistant .body")).to_have_text("Yes.")
    expect(page.locator(".assistant .reasoning div")).to_be_hidden()
    page.locator(".assistant .reasoning summary").click()
    expect(page.locator(".assistant .reasoning div")).to_have_text("<b>Hm</b>")
    page.reload()
    expect(page.locator(".assistant .reasoning div")).to_have_text("<b>Hm</b>")
    assert page.locator("article.user .reasoning").is_hidden()


def test_an_adapter_is_chosen_in_the_settings(visit, address):
    asked = []

    def models(route):
        (one,) = route.fetch().json()["data"]
        both = [one, {**one, "id": "sql", "parent": one["id"]}]
        route.fulfill(json={"object": "list", "data": both})

    page = visit(address)
    page.click("#open-settings")
    expect(page.get_by_label("Model")).to_be_hidden()
    page.keyboard.press("Escape")
    page.route("**/v1/models", models)
    page.on("request", lambda request: asked.append(request.post_data_json or {}))
    page.reload()
    page.click("#open-settings")
    page.get_by_label("Model").select_option("sql")
    page.click("#settings button.main")
    page.reload()
    expect(page.locator("#model")).to_have_text("sql")
    say(page, "hello")
    expect(page.locator(".error")).to_contain_text("Reload the page")
    assert asked[-1]["model"] == "sql"
