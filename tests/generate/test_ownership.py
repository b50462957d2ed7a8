"""Whoever owns a state changes it: `generate` writes no attribute of another object."""

import ast
from collections.abc import Iterator
from pathlib import Path

import workhorse.generate

FOLDER = Path(str(workhorse.generate.__file__)).parent


def written(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets to which a statement writes."""
    match node:
        case ast.Assign(targets) | ast.Delete(targets):
            waiting = list(targets)
        case ast.AugAssign(target) | ast.AnnAssign(target) | ast.For(target):
            waiting = [target]
        case _:
            return
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
            continue
        while isinstance(target, ast.Subscript | ast.Starred):  # an element of an attribute
            target = target.value
        yield target


def test_no_attribute_of_another_object_is_written() -> None:
    foreign = [
        f"{path.name}:{target.lineno}: {ast.unparse(target)}"
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for target in written(node)
        if isinstance(target, ast.Attribute)
        if not (isinstance(target.value, ast.Name) and target.value.id == "self")
    ]
    assert not foreign
