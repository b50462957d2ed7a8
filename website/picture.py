"""Make the picture of the README from the page that its commands write.

    make demo chat inspect
    python -m website.picture

It needs playwright (`pip install playwright`) and Chromium, as `chromium` in PATH or in the
variable CHROMIUM.
"""

import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE = Path("runs/inspect.html")
PICTURE = Path("docs/forward.png")


def main() -> None:
    """Take the picture: the predictions after every layer, and the terms of a logit."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 950})
        page.goto(PAGE.absolute().as_uri())
        page.get_by_role("heading", name="Layers refine a prediction").evaluate(
            "heading => scrollTo(0, heading.getBoundingClientRect().top + scrollY - 70)"
        )
        page.wait_for_timeout(500)  # for the parts that are drawn when they are visible
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
