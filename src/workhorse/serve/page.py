"""The page for browsers, and the policy that protects it."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.responses import HTMLResponse, Response

FILE = Path(__file__).with_name("page.html")


class Page:
    """The page at `/`.

    Browsers run only its own script and styles, load nothing else, and connect only to this server.
    """

    def __init__(self) -> None:
        self._html = FILE.read_text(encoding="utf-8")
        self.headers = {
            "Content-Security-Policy": f"default-src 'none'; script-src {self._hash('script')}; "
            f"style-src {self._hash('style')}; img-src data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    @property
    def response(self) -> Response:
        return HTMLResponse(self._html, headers=self.headers)

    def _hash(self, tag: str) -> str:
        """The source expression that allows the page's only element of this name."""
        (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", self._html, re.DOTALL)
        return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
