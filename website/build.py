"""Builds the documentation site: `python -m website.build` writes `build/site`.

The pages of docs/ are plain Markdown that also reads well without this site. They are copied into
`build/pages` with generated pages beside them, and Zensical turns this folder into HTML. A link to
a file outside docs/ leads to a copy of the file in `repository/`.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

from website import walk

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)", re.M | re.S)
"""A link to a file, with its path and its anchor; or a piece of code, without a path."""
OUTPUT = re.compile(r"^```text$", re.M)
"""The beginning of an output, which the style sheet shows in another way than code."""
GENERATED = ("walk/", "api/", "repository/")
"""Folders of the site with pages that are made from the source, or are not for users."""
RECIPE = re.compile(r"\b(?:recipes|studies)/[\w-]+\.(?:yaml|py)\b")
"""A file that pages name in code, and that becomes a link."""
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
    code = subprocess.run(command, cwd=config.parent, check=False).returncode
    if code == 0:
        shutil.copy(ROOT / "website" / "404.html", SITE)
        order_search()
    return code


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
            {"pymdownx.highlight": {"anchor_linenums": True, "linenums_style": "pymdownx-inline"}},
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
            for path in sorted(folder.glob(item), key=lambda path: path.stem):
                page = path.relative_to(folder).as_posix()
                said = summary(ROOT / "studies" / f"{path.stem}.yaml") if "studies" in item else ""
                title = textwrap.shorten(f"{path.stem}: {said}", 70, placeholder=" …")
                found.append({title: page} if said else page)
        else:
            found.append(item)
    return found


def summary(path: Path) -> str:
    """One sentence about a file, from the file: of a study, its question. '' if it has none."""
    text = path.read_text("utf-8") if path.is_file() else ""
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    content = (yaml.safe_load(text) if path.suffix == ".yaml" else None) or {}
    said = " ".join(content.get("question", content.get("description", "")).split())
    found = re.match(r"(?:C\d+[.,] )*([^?]*\?|.*?\.(?= |$))", said)
    return found[1] if found else said


def stage() -> None:
    """Write all pages of the site: docs/, the generated pages, and the files that they link to."""
    from website import api

    generated = {f"docs/{page}": text for page, text in {**walk.pages(), **api.pages()}.items()}
    docs = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    waiting = [*docs, *generated, "recipes", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for source in waiting:  # grows by the files that pages link to
        target = PAGES / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copy(ROOT / source, target)
            continue
        page = generated.get(source) or text_of(source)
        if source.startswith("docs/course/"):
            page += walk.beside(target.stem)
        text, links = for_site(page, source)
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
        files = sorted(file for file in path.iterdir() if file.is_file())
        lines = [f"- [`{file.name}`]({file.name}): {summary(file)}" for file in files]
        return f"# {source}/\n\n" + "\n".join(line.removesuffix(": ") for line in lines)
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "text")
    title = path.name.replace("_", "\\_")
    numbered = f'````{{.{language} linenums="1"}}'
    return f"# {title}\n\n`{source}`\n\n{numbered}\n{text}````\n"


def for_site(text: str, source: str) -> tuple[str, list[str]]:
    """Change the links of a page to addresses on the site; also return their targets."""
    folder = ROOT / source if (ROOT / source).is_dir() else (ROOT / source).parent
    here = Path(place(source)).parent
    targets: list[str] = []

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        code = "" if path or found[0].startswith("```") else found[0].replace("\\|", "|")
        recipe = RECIPE.search(code)
        is_linked = text[found.start() - 1] == "[" or (recipe and recipe[0] == source)
        if recipe and (ROOT / recipe[0]).is_file() and not is_linked:
            target, start = recipe[0], f"[{code}"
        elif path is None:  # GitHub needs `\|` in tables; Zensical would show the backslash
            return code or found[0]
        else:
            target, start = Path(os.path.relpath(folder / path, ROOT)).as_posix(), ""
        targets.append(target)
        if target.endswith(".py"):
            before = text[max(0, found.start() - 120) : found.start()]
            anchor = (anchor or line_of(target, before)).replace("#L", "#__codelineno-0-")
        return f"{start}]({Path(os.path.relpath(place(target), here)).as_posix()}{anchor})"

    return OUTPUT.sub("```{.text .output}", LINK.sub(link, text)), targets


def order_search() -> None:
    """Let a search show guides before equal matches, and neither source files nor the changelog."""
    before = (SITE / "search.json").read_text("utf-8")
    index = json.loads(before)
    hidden = ("repository/src/", "repository/CHANGELOG")
    items = [item for item in index["items"] if not item["location"].startswith(hidden)]
    index["items"] = sorted(items, key=lambda item: item["location"].startswith(GENERATED))
    after = json.dumps(index)
    for name in ("search.json", "search.js"):  # the same, for servers and for files
        path = SITE / name
        path.write_text(path.read_text("utf-8").replace(before, after), "utf-8")


def line_of(source: str, before: str) -> str:
    """The anchor of the definition that a link means: of the last name before it in the file."""
    code = (ROOT / source).read_text("utf-8")
    for name in reversed(re.findall(r"`(?:\w+\.)*(\w+)`", before)):
        if found := re.search(rf"^ *(?:class|def) {name}\b", code, re.M):
            return f"#L{code.count(chr(10), 0, found.start()) + 1}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
