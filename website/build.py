"""Builds the documentation site: `python -m website.build` writes `build/site`.

The pages of docs/ are plain Markdown that also reads well without this site. They are copied into
`build/pages` with generated pages beside them, and Zensical turns this folder into HTML. A link to
a file outside docs/ leads to a copy of the file in `repository/`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from website import walk

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)", re.M | re.S)
"""A link to a file, with its path and its anchor; or a piece of code, without a path."""
NAVIGATION: list[Any] = yaml.safe_load((ROOT / "website" / "nav.yaml").read_text("utf-8"))


def main() -> int:
    """Build the site; 0 if there was neither an error nor a warning."""
    if problems := walk.problems():
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    stage()
    config = PAGES.with_suffix(".yml")
    config.write_text(json.dumps(settings(), indent=1), "utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)]
    return subprocess.run(command, cwd=config.parent, check=False).returncode


def settings() -> dict[str, Any]:
    """The configuration of Zensical, in the form of an `mkdocs.yml`."""
    github_anchors = {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}}
    return {
        "site_name": "Workhorse",
        "docs_dir": PAGES.name,
        "site_dir": SITE.name,
        "nav": navigation(PAGES),
        "extra_css": ["site.css"],
        "extra": {"polyfills": ["iframe-worker.js"], "generator": False},
        "plugins": ["search", "offline"],
        "theme": {
            "font": False,  # the reader's fonts: others would be downloaded
            "features": ["navigation.indexes", "navigation.footer", "navigation.top"],
            "palette": [
                {"media": f"(prefers-color-scheme: {scheme})", "scheme": name}
                for scheme, name in (("light", "default"), ("dark", "slate"))
            ],
        },
        "markdown_extensions": [
            "tables",
            "sane_lists",
            {"toc": {"slugify": github_anchors, "permalink": True, "toc_depth": 3}},
            "pymdownx.superfences",
            "pymdownx.highlight",
        ],
    }


def navigation(folder: Path, items: list[Any] | None = None) -> list[Any]:
    """`nav.yaml` with the pages of a folder in place of patterns; empty sections are omitted."""
    found: list[Any] = []
    for item in NAVIGATION if items is None else items:
        if isinstance(item, dict):
            (title, inner), *_ = item.items()
            pages = inner if isinstance(inner, str) else navigation(folder, inner)
            found += [{title: pages}] if pages else []
        elif "*" in item:
            pages = sorted(folder.glob(item), key=lambda path: path.stem)
            found += [page.relative_to(folder).as_posix() for page in pages]
        else:
            found.append(item)
    return found


def stage() -> None:
    """Write all pages of the site: docs/, the generated pages, and the files that they link to."""
    from website import api

    generated = {f"docs/{page}": text for page, text in {**walk.pages(), **api.pages()}.items()}
    docs = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    waiting = [*docs, *generated, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for source in waiting:  # grows by the files that pages link to
        target = PAGES / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copy(ROOT / source, target)
            continue
        text, links = for_site(generated.get(source) or text_of(source), source)
        target.write_text(text, "utf-8")
        waiting += [link for link in links if link not in waiting]
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(ROOT / "website" / name, PAGES)


def place(source: str) -> str:
    """The path on the site of a file of the repository."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    is_shown = source.endswith((".md", ".svg", ".png"))
    return f"repository/{source}" if is_shown else f"repository/{source}.md"


def text_of(source: str) -> str:
    """The Markdown of a page; for a folder or a file in another language, a page that shows it."""
    path = ROOT / source
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.is_file())
        return f"# {source}/\n\n" + "\n".join(f"- [{name}]({name})" for name in files)
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "text")
    return f"# {path.name}\n\n`{source}`\n\n````{language}\n{text}````\n"


def for_site(text: str, source: str) -> tuple[str, list[str]]:
    """Change the links of a page to addresses on the site; also return their targets."""
    folder = ROOT / source if (ROOT / source).is_dir() else (ROOT / source).parent
    here = Path(place(source)).parent
    targets: list[str] = []

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if path is None:  # GitHub needs `\|` in tables; Zensical would show the backslash
            return found[0] if found[0].startswith("```") else found[0].replace("\\|", "|")
        target = Path(os.path.relpath(folder / path, ROOT)).as_posix()
        targets.append(target)
        return f"]({Path(os.path.relpath(place(target), here)).as_posix()}{anchor})"

    return LINK.sub(link, text), targets


if __name__ == "__main__":
    sys.exit(main())
