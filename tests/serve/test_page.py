"""The page for browsers, without a browser; tests/campaigns/test_page.py drives it."""

import asyncio
import base64
import hashlib
import re

from tests.serve.conftest import in_threads
from tests.serve.fake_engine import make
from tests.serve.raw import ask
from workhorse.serve.page import FILE, page
from workhorse.serve.settings import EngineSettings

PAGE = FILE.read_text()


def test_the_page_is_served_with_a_policy_that_allows_only_itself():
    async def main(address):
        reply = await ask(address, "GET", "/")
        shown = reply.body.decode()
        assert (reply.status, shown) == (200, page().body.decode())
        assert (len(shown) > len(PAGE), '"OPTIONS"' in shown) == (True, False)
        policy = reply.headers["content-security-policy"]
        for tag in ("script", "style"):
            (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", shown, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}';" in policy
        assert "unsafe" not in policy
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy.split("; "))
        (model,) = (await ask(address, "GET", "/v1/models")).json["data"]
        assert (model["trained_to_chat"], model["sampling"]["temperature"]) == (False, 1.0)

    with in_threads(*make(EngineSettings("fake")), name="fake") as address:
        asyncio.run(main(address))


def test_the_page_is_one_file_that_never_parses_text_as_html():
    assert len(PAGE.splitlines()) <= 1500
    assert not re.search(r"""(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//""", PAGE)
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", PAGE)
    assert not re.search(r"""call\(["'`]/""", PAGE)  # behind a proxy, the page has a path prefix
    assert not re.search(r"""\s(?:style|on[a-z]+)=["']""", PAGE)  # the policy forbids them
    # `fetch` refuses an address with a user and a password, as the page's own may have.
    assert re.findall(r"\bfetch\((\w+)", PAGE) == ["address"]
    assert 'address.username = address.password = "";' in PAGE


def test_a_reply_continues_after_given_tokens():
    async def main(address):
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        body |= {"logprobs": True, "top_logprobs": 2, "reply_tokens": [120, 121]}
        reply = (await ask(address, "POST", "/v1/chat/completions", body)).json
        assert reply["usage"]["prompt_tokens"] == len("User: a\nAssistant:xy")
        entries = reply["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == list(b"Us")
        assert [other["token_id"] for other in entries[0]["top_logprobs"]] == list(b"U*")
        body = {"model": "fake", "prompt": "ab", "max_tokens": 2, "logprobs": 2}
        reply = (await ask(address, "POST", "/v1/completions", body | {"chat_logprobs": True})).json
        entries = reply["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == list(b"ab")

    with in_threads(*make(EngineSettings("fake")), name="fake") as address:
        asyncio.run(main(address))
