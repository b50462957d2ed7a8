"""Campaign: build the documentation site without a warning, and open every page in a browser.

    make campaign-site

The second test needs playwright (`pip install playwright`) and Chromium, as `chromium` in PATH or
in the environment variable `CHROMIUM`.
"""

import subprocess
import sys
import time
from typing import Any

import pytest

from website.build import ROOT, SITE

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def output() -> str:
    """The output of a strict build."""
    pytest.importorskip("zensical")
    began = time.monotonic()
    command = [sys.executable, "-m", "website.build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"the build took {time.monotonic() - began:.0f} s")
    return done.stdout + done.stderr


def test_a_strict_build_has_no_warnings(output: str) -> None:
    assert "No issues found" in output
    assert "warning" not in output.lower()
    assert '"location": "repository/src/' not in (SITE / "search.json").read_text("utf-8")


@pytest.mark.usefixtures("output")
def test_no_page_loads_anything_from_a_network(browser: Any) -> None:
    """Each page is opened as a file; the first one also answers a search."""
    page = browser.new_context(offline=True).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    aborted = "net::ERR_ABORTED"  # by opening the next page
    page.on("requestfailed", lambda one: one.failure == aborted or problems.append(one.url))
    page.on("request", lambda one: one.url.startswith("file:") or problems.append(one.url))
    for path in sorted(SITE.rglob("*.html")):
        if path.name != "404.html":  # for servers: its addresses begin at their root
            page.goto(path.as_uri())
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("choosing tokens", delay=100)
    page.get_by_text("Choosing tokens").first.wait_for()
    assert problems == []
