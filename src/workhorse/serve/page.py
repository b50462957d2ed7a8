"""The page for browsers, and the policy that protects it."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response

from workhorse.generate.options import served, table

FILE = Path(__file__).with_name("page.html")


def page() -> Response:
    """Return the page at `/`.

    Browsers run only its own script and styles, load nothing else, and connect only to this server.
    """
    html = FILE.read_text(encoding="utf-8").replace('"OPTIONS"', json.dumps(_options()))
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    headers = {
        "Content-Security-Policy": f"default-src 'none'; script-src {script}; style-src {style}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _options() -> list[dict[str, Any]]:
    """Return the form's fields for the options of `workhorse.generate.options`."""
    return [
        {
            "name": name,
            "label": name.replace("_", " ").capitalize(),
            "min": one.least + (0.01 if one.is_above else 0),
            "max": one.most,
            "step": "any" if table()[name].type is float else 1,
            "hint": one.hint,
        }
        for name, one in served().items()
    ]


def _hash(html: str, tag: str) -> str:
    """Return the source expression that allows the only element of a name."""
    (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
