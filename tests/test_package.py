"""Checks of the package: extras, public names, imports, and lists of tests and mutations."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

import workhorse
from workhorse.config.base import parse_yaml, read_yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {
    name: [re.split(r"[<>=\[]", requirement)[0] for requirement in requirements]
    for name, requirements in PROJECT["optional-dependencies"].items()
    if name != "dev"
}
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
SOURCE = "".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))


def test_everything_public_is_found_by_completion_and_on_use():
    assert {"load", "save", "config", "train", "nn"} <= set(dir(workhorse))
    assert workhorse.config.base.read_yaml is read_yaml
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = workhorse.nope


@pytest.mark.parametrize("name", EXTRAS)
def test_the_package_uses_what_an_extra_installs(name: str):
    """The source imports each package, or names it for a late import (trackers)."""
    for package in EXTRAS[name]:
        module = package.replace("-", "_")
        assert re.search(rf'import {module}\b|from {module}\b|"{module}["\.]', SOURCE), package


def test_every_extra_that_a_message_names_exists():
    assert "workhorse[" not in SOURCE  # no package index has workhorse
    assert set(re.findall(r"to_install\(['\"](\w+)", SOURCE)) <= set(EXTRAS)


def test_the_newest_release_of_the_changelog_is_the_version():
    unreleased, *releases = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(workhorse.__version__)} - \d{{4}}-\d\d-\d\d", releases[0])
    assert PROJECT["dynamic"] == ["version"]
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    assert hatch["version"]["path"] == "src/workhorse/__init__.py"


def test_an_entry_of_the_changelog_is_one_short_line():
    for line in CHANGELOG.splitlines():
        assert not line.startswith(" ")
        assert len(line) <= 160, line


def test_grids_names_tests_that_exist():
    grids = yaml.safe_load((ROOT / "tests" / "grids.yaml").read_text("utf-8"))
    assert list(grids) == sorted(grids)
    for test in grids:
        path, name = test.partition("[")[0].split("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), test


def test_the_text_that_a_mutation_replaces_stands_in_the_source_once():
    """A change of the source must not silently disable an entry of `*mutations.yaml`."""
    for mutations in sorted((ROOT / "tests" / "campaigns").glob("*mutations.yaml")):
        for change in (
            change for one in parse_yaml(mutations.read_text("utf-8")) for change in one["changes"]
        ):
            text = (ROOT / "src" / "workhorse" / change["file"]).read_text("utf-8")
            assert text.count(change["old"]) == 1, change


def test_facts_live_with_the_class():
    """Code outside `nn` and `transforms` asks their classes for facts, and rarely tests for one.

    It counts lines with `isinstance`, or a comparison of a `type(…)`, that name a class of these
    packages outside the package.
    """
    source = ROOT / "src" / "workhorse"
    lines = [line for path in source.rglob("*.py") for line in class_tests(path, source)]
    assert len(lines) <= 25, lines  # an upper bound: reduce it when a check is removed


def class_tests(path: Path, source: Path) -> list[str]:
    others = {"workhorse.nn", "workhorse.transforms"}
    others -= {f"workhorse.{path.relative_to(source).parts[0]}"}
    tree = ast.parse(path.read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    theirs = [node for node in imports if ".".join((node.module or "").split(".")[:2]) in others]
    classes = {alias.asname or alias.name for node in theirs for alias in node.names}
    found: set[int] = set()
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            tested = [node.args[1]]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            of_type = [getattr(getattr(one, "func", None), "id", "") == "type" for one in sides]
            tested = [*sides] if any(of_type) else []
        names = {one.id for side in tested for one in ast.walk(side) if isinstance(one, ast.Name)}
        if names & classes:
            found.add(node.lineno)
    return [f"{path.relative_to(source)}:{line}" for line in sorted(found)]


def test_no_files_import_each_other():
    """Imports inside functions count too. import-linter checks the order of packages."""
    source = ROOT / "src"
    modules: dict[str, Path] = {}
    for path in (source / "workhorse").rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    order = TopologicalSorter({name: imports(path, modules) for name, path in modules.items()})
    order.prepare()  # raises CycleError, which names the files of a circle


def imports(path: Path, modules: Collection[str]) -> set[str]:
    """Return the modules that a file imports at run time, without their packages' `__init__`."""
    tree = ast.parse(path.read_text("utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    skipped = {node for block in typing for one in block.body for node in ast.walk(one)}
    found: set[str] = set()
    for node in set(ast.walk(tree)) - skipped:
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


IMPORT_EACH = """
import os, sys
import numpy, pydantic, torch, yaml  # once for all
for name in sys.argv[1:]:
    if not os.fork():
        __import__(name)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{name} cannot be imported first")
"""


def import_each(modules: list[str]) -> None:
    call = [sys.executable, "-c", IMPORT_EACH, *modules]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_packages_behind_verbs_can_be_imported_first():
    import_each([f"workhorse.{name}" for name in ("plan", "compare", "scaling", "memory.account")])


@pytest.mark.slow
@pytest.mark.parametrize("package", ["execute", "memory", "model", "run", "train"])
def test_every_module_of_large_packages_can_be_first(package: str):
    source = ROOT / "src"
    found = (source / "workhorse" / package).rglob("*.py")
    names = [".".join(path.relative_to(source).with_suffix("").parts) for path in found]
    import_each([name.removesuffix(".__init__") for name in names])
