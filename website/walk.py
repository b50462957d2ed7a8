"""The walk: pages that explain the forward pass statement by statement, made from the source.

The files in `website/walk/` name functions of `src/workhorse/nn` and explain their statements. An
explanation holds the code that it belongs to. If the code changes, or a statement of a named
function has no explanation, `problems` reports it and the pages are not built.
"""

import ast
import functools
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SOURCE = Path(__file__).parent.parent / "src" / "workhorse"
FOLDER = Path(__file__).parent / "walk"
COURSE = Path(__file__).parent.parent / "docs" / "course"
Step = dict[str, str]
"""An explanation: `code`, `text`, and possibly `math`, `shape` and `paper`."""
WALKS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted(FOLDER.glob("[0-9]*.yaml"))
}
"""Content of each page: `title`, `text`, `course` (names of pages of the course with the same
subject) and `parts`; a part has a `title`, `text` and `source`."""
EXCLUDED: dict[str, str] = yaml.safe_load((FOLDER / "excluded.yaml").read_text("utf-8"))
"""Functions that a forward pass calls and the walk does not explain, each with the reason."""


class Statement(NamedTuple):
    """A statement of a function; of an `if` or a loop, only its first line."""

    first: int
    """Number of its first line, from 1. Comments and `else:` above it belong to it."""
    last: int
    """Number of its last line."""
    text: str
    """These lines of the file."""


class Function(NamedTuple):
    """A function of the source."""

    line: int
    """Number of the line with `def`."""
    signature: str
    """The lines from `def` to the docstring."""
    summary: str
    """The first paragraph of its docstring; for `__init__` and `forward`, possibly of the class."""
    statements: list[Statement]
    """All its statements, including the statements of functions inside it."""


@functools.cache
def functions(file: str) -> dict[str, Function]:
    """All functions of a file, by qualified name, such as `Decoder.forward`."""
    text = (SOURCE / file).read_text("utf-8")
    lines = text.splitlines()
    found: dict[str, Function] = {}

    def visit(node: ast.AST, names: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, [*names, child.name])
            elif isinstance(child, ast.FunctionDef):
                of_class = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
                inherited = of_class if child.name in ("__init__", "forward") else None
                found[".".join([*names, child.name])] = _function(child, lines, inherited or "")

    visit(ast.parse(text), [])
    return found


def _function(node: ast.FunctionDef, lines: list[str], of_class: str) -> Function:
    docstring = ast.get_docstring(node)
    summary = (docstring or of_class).split("\n\n")[0]
    body = node.body[1:] if docstring else node.body
    nested = [child for part in body for child in ast.walk(part) if isinstance(child, ast.stmt)]
    starts = sorted(nested, key=lambda statement: statement.lineno)
    statements: list[Statement] = []
    above = node.body[0].end_lineno or 0 if docstring else body[0].lineno - 1
    for statement, after in zip(starts, [*starts[1:], None], strict=False):
        last = statement.end_lineno or 0
        if after is not None and after.lineno <= last:  # a header: it ends where its block begins
            last = next(n for n in range(after.lineno - 1, 0, -1) if code_of(lines[n - 1]))
        statements.append(Statement(above + 1, last, "\n".join(lines[above:last])))
        above = last
    first = node.body[0].lineno - 1
    signature = "\n".join(lines[node.lineno - 1 : first])
    return Function(node.lineno, signature, summary, statements)


def code_of(text: str) -> str:
    """The tokens of a piece of Python, without comments and white space."""
    flat = "\n".join(line.lstrip() for line in text.splitlines())
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(flat).readline))
    except tokenize.TokenError:  # a part of an expression
        return flat
    return " ".join(token.string for token in tokens if token.type not in layout)


def walked() -> Iterator[tuple[str, str, list[Step]]]:
    """File, function and explanations of each function of the walk."""
    for walk in WALKS.values():
        for part in walk["parts"]:
            for name, steps in part["source"].items():
                yield *name.split(), steps


def explained(file: str, name: str, steps: list[Step]) -> list[tuple[str, Step]]:
    """The source of a function in pieces of one or more statements, each with its explanation.

    Raises:
        ValueError: a statement has no explanation, or an explanation has other code.
    """
    found = functions(file).get(name)
    if found is None:
        raise ValueError(f"{file} has no function {name}; remove it from website/walk")
    waiting = list(found.statements)
    together: list[tuple[str, Step]] = []
    for step in steps:
        wanted = code_of(step["code"])
        taken: list[Statement] = []
        code = ""
        while waiting and code != wanted and wanted.startswith(code):
            taken.append(waiting.pop(0))
            code = code_of("\n".join(statement.text for statement in taken))
        if not taken or code != wanted:
            said = step["code"].strip()
            here = taken[-1].text.strip() if taken else "the end of the function"
            raise ValueError(
                f"{file} {name}: `{said}` is explained, but the source has `{here}`; "
                "change the explanation in website/walk"
            )
        text = textwrap.dedent("\n".join(statement.text for statement in taken))
        together.append((text.strip("\n"), step))
    if waiting:
        raise ValueError(
            f"{file} {name}: `{waiting[0].text.strip()}` is not explained; add it to website/walk"
        )
    return together


def problems() -> list[str]:
    """Differences between explanations and source, as messages."""
    found: list[str] = []
    for file, name, steps in walked():
        try:
            explained(file, name, steps)
        except ValueError as error:
            found.append(str(error))
    return found


def pages() -> dict[str, str]:
    """The pages of the walk, by path; raises the errors of `explained`."""
    return {f"walk/{name}.md": page(walk) for name, walk in WALKS.items()}


def page(walk: dict[str, Any]) -> str:
    """A page of the walk."""
    lines = [f"# {walk['title']}", walk["text"]]
    pages = [f"[{heading(name)}](../course/{name}.md)" for name in walk["course"]]
    lines += [f"In the course, with numbers: {', '.join(pages)}."]
    for part in walk["parts"]:
        lines += [f"## {part['title']}", part.get("text", "")]
        for name, steps in part["source"].items():
            file, function_name = name.split()
            lines += function(file, function_name, steps)
    return "\n\n".join(line.strip("\n") for line in lines if line) + "\n"


def heading(name: str) -> str:
    """The title of a page of the course."""
    text = (COURSE / f"{name}.md").read_text("utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def beside(name: str) -> str:
    """A paragraph with links from a page of the course to the walk; empty without such pages."""
    found = [
        f"[{walk['title']}](../walk/{page}.md)"
        for page, walk in WALKS.items()
        if name in walk["course"]
    ]
    return f"\nEvery statement of the source explained: {', '.join(found)}.\n" if found else ""


def function(file: str, name: str, steps: list[Step]) -> Iterator[str]:
    """A function: its summary beside its signature, then explanations beside statements."""
    found = functions(file)[name]
    yield f"### `{name}`"
    where = f"[{file}](../../src/workhorse/{file}#L{found.line})"
    yield quoted(f"{found.summary}\n\n{where}" if found.summary else where)
    yield fenced(textwrap.dedent(found.signature))
    for code, said in explained(file, name, steps):
        math = f"`{said['math']}`" if "math" in said else ""
        number, _, section = said.get("paper", "").partition(" ")
        paper = f"[arXiv {number}](https://arxiv.org/abs/{number}) {section}" if number else ""
        facts = " · ".join(filter(None, (said.get("shape"), paper.strip())))
        yield quoted("\n\n".join(filter(None, (math, facts, said["text"]))))
        yield fenced(code)


def fenced(code: str) -> str:
    """A block of Python."""
    return f"```python\n{code}\n```"


def quoted(text: str) -> str:
    """A block quote, which the style sheet places beside the code below it."""
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
