"""Every command and code block of the README and of docs/ runs without errors.

Each page is followed from top to bottom in a separate folder with recipes, documents and a Hugging
Face model. For all pages except docs/commands.md the folder also has a finished run.
`documents.yaml` lists the replacements that make commands fast, and the blocks that are not run,
with the reason. A block in an unknown language fails. A block of `text` that is not listed is what
the block before it prints: decimals may differ by one in their last place. Of blocks listed as
`printed`, only the words are compared.
"""

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import torch
import yaml

import workhorse
from workhorse.cli.main import command, main
from workhorse.compare import read_study
from workhorse.config.base import parse_yaml, read_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.model.convert import convert
from workhorse.nn import DecoderConfig
from workhorse.tokenizers import SpecialTokensConfig, train_tokenizer
from workhorse.tokenizers.config import BpeConfig
from workhorse.train import Recipe, with_init
from workhorse.train.recipe.keys import NAME, configs_at, recipe_configs

ROOT = Path(__file__).parent.parent
PLAN: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "documents.yaml").read_text("utf-8"))
PAGES: list[str] = PLAN["pages"]
MESSAGES = "Hello\n/exit\n"
"""Input of `workhorse chat`."""


class Block(NamedTuple):
    """A fenced block of a page; `where` is the page and the line."""

    language: str
    text: str
    where: str


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text("utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: found.start()].count("\n") + 1
        yield Block(found[1], in_small(found[2], page), f"{page}:{line}")


def in_small(text: str, page: str) -> str:
    """Replace strings of a page as `documents.yaml` lists them, so that commands are fast."""
    for table in (page, "everywhere"):
        for old, new in PLAN["instead"].get(table, {}).items():
            text = text.replace(old, new)
    return text


def entry(table: str, text: str) -> str | None:
    """The entry in a table of `documents.yaml` for a line or block, matched by its beginning."""
    return next((said for start, said in PLAN[table].items() if text.startswith(start)), None)


class Reader:
    """Follows a page block by block: runs commands and code, reads YAML, saves files."""

    def __init__(self, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = page
        self.monkeypatch = monkeypatch
        self.names: dict[str, object] = {"__name__": "page"}
        self.printed = io.StringIO()
        self.errors = io.StringIO()

    def follow(self, block: Block) -> None:
        if (file := entry("files", block.text)) is not None:
            self.write(file, block.text)
        elif entry("shown", block.text) is not None:
            return
        elif (other := entry("printed", block.text)) is not None:
            printed = self.printed.getvalue() + self.errors.getvalue()
            unknown = words(block.text) - words(printed) - words(other)
            assert not unknown, f"{block.where}: {sorted(unknown)} are not in\n{printed}"
        elif block.language == "text":
            printed = self.printed.getvalue()
            assert same_output(block.text, printed), f"{block.where}: it prints\n{printed}"
        elif block.language == "python":
            if entry("not_run", block.text) is not None:
                return
            with self.recorded():
                exec(compile(block.text, block.where, "exec"), self.names)
        elif block.language == "yaml":
            self.read_yaml(block)
        elif not block.language:
            with self.recorded():
                for line in block.text.replace("\\\n", " ").splitlines():
                    self.run(line.strip(), block.where)
        else:
            pytest.fail(
                f"{block.where}: unknown block language {block.language}; add it to Reader.follow"
            )

    def recorded(self) -> contextlib.redirect_stdout[io.StringIO]:
        """Context manager that records what one block prints."""
        self.printed, self.errors = io.StringIO(), io.StringIO()
        return contextlib.redirect_stdout(self.printed)

    def run(self, line: str, where: str) -> None:
        if not line or line.startswith("#") or entry("not_run", line) is not None:
            return
        arguments = shlex.split(line, comments=True)
        assert arguments[0] == "workhorse", f"{where}: {line!r} is not a workhorse command"
        self.monkeypatch.setattr("sys.stdin", io.StringIO(MESSAGES))
        self.monkeypatch.setattr("sys.stderr", self.errors)
        assert main(arguments[1:]) == 0, f"{where}: {line}\n{self.errors.getvalue()}"

    def read_yaml(self, block: Block) -> None:
        """Read a block: a file, a recipe, one section with its place, or several sections."""
        fields = parse_yaml(block.text)
        title = re.match(r"# (\S+)\n", block.text)
        if title and title[1].endswith(".yaml"):
            self.write(title[1], block.text)
        elif title:
            config_at(title[1], fields.get("kind")).from_dict(fields)
        elif "train" in fields:
            Recipe.from_dict(with_init(fields))
        else:
            for place, inner in fields.items():
                config_at(place, inner.get("kind")).from_dict(inner)

    def write(self, file: str, text: str) -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text, "utf-8")


def words(text: str) -> set[str]:
    """The words of an output, in lower case, without numbers and units of memory."""
    return set(re.findall(r"\b[a-z]{2,}\b", text.lower())) - {"kib", "mib", "gib"}


DECIMAL = re.compile(r"(-?\d+\.\d+)")


def same_output(shown: str, printed: str) -> bool:
    """True if outputs agree, but for one in the last place of decimals and spaces at line ends."""
    mine, theirs = (
        DECIMAL.split(re.sub(r" +$", "", text, flags=re.M).strip()) for text in (shown, printed)
    )
    if len(mine) != len(theirs) or mine[::2] != theirs[::2]:
        return False
    pairs = zip(mine[1::2], theirs[1::2], strict=True)
    return all(abs(float(a) - float(b)) < 1.1 * 10 ** -len(a.partition(".")[2]) for a, b in pairs)


def config_at(place: str, kind: str | None) -> Any:
    """The config class at a place of a recipe, selected by its kind."""
    here = [config for config, places in recipe_configs(Recipe)[1].items() if place in places]
    kinds = {config: config.model_fields.get("kind") for config in here}
    found = [
        config
        for config, field in kinds.items()
        if len(here) == 1 or field is None or field.default == kind
    ]
    assert len(found) == 1, f"{place} has no kind {kind}"
    return found[0]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small recipes and studies, documents and a Hugging Face model; no runs."""
    folder = tmp_path_factory.mktemp("before")
    (folder / "recipes").mkdir()
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        small = apply_overrides(read_yaml(file), PLAN["recipes"])
        (folder / "recipes" / file.name).write_text(yaml.safe_dump(small, sort_keys=False))
    (folder / "studies").mkdir()
    for file in sorted((ROOT / "studies").glob("*.yaml")):
        small = apply_overrides(read_study(file).to_dict(), PLAN["studies"])
        (folder / "studies" / file.name).write_text(yaml.safe_dump(small, sort_keys=False))
    for name in ("texts", "other-texts"):
        (folder / name).mkdir()
        for number in range(24):
            text = "".join(f"def f{number}(x):\n    return {name!r}, {n}\n\n" for n in range(12))
            (folder / name / f"{number}.txt").write_text(text)
    (folder / "book.txt").write_text("A single file, long enough for a line or two. " * 9)
    _somebody_elses_model(folder / "their-model", folder)
    return folder


def _somebody_elses_model(target: Path, folder: Path) -> None:
    texts = [path.read_text() for path in sorted((folder / "texts").iterdir())]
    special = SpecialTokensConfig(bos=None, eos="</s>", pad=None, chat=())
    tokenizer = train_tokenizer(BpeConfig(vocab_size=300, special=special), texts)
    config = DecoderConfig.from_dict({**PLAN["their_model"], "vocab_size": tokenizer.vocab_size})
    ours = workhorse.save(config.build(), folder / "their-model-in-our-format", tokenizer=tokenizer)
    convert(ours, target, "hf")
    shutil.rmtree(ours)


@pytest.fixture(scope="module")
def with_runs(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with the demo's run, under every name that pages use for it."""
    folder = tmp_path_factory.mktemp("after") / "folder"
    shutil.copytree(fresh, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "recipes/stdlib-small.yaml", "--out", "runs/first"]) == 0
    for name in PLAN["runs"]:
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """`Reader.follow` raises an error at the first block that fails."""
    start: Path = request.getfixturevalue("fresh" if page == "docs/commands.md" else "with_runs")
    folder = tmp_path / "folder"
    shutil.copytree(start, folder)
    monkeypatch.chdir(folder)
    torch.set_printoptions(profile="default")  # a page may change it
    reader = Reader(page, monkeypatch)
    for block in blocks(page):
        reader.follow(block)


def test_every_page_is_gone_through():
    folders = ("docs", "docs/course")
    there = {f"{folder}/{path.name}" for folder in folders for path in (ROOT / folder).glob("*.md")}
    assert set(PAGES) == {"README.md", *there}


def test_the_plan_has_nothing_that_no_page_needs():
    texts = {page: (ROOT / page).read_text("utf-8") for page in PAGES}
    everything = "".join(texts.values())
    everything += in_small(everything, "everywhere")  # some strings result from another replacement
    for page, table in PLAN["instead"].items():
        assert [old for old in table if old not in texts.get(page, everything)] == [], page
    for table in ("files", "shown", "printed", "not_run"):
        assert [start for start in PLAN[table] if start not in everything] == [], table


def inline_commands(page: str) -> Iterator[str]:
    """Commands that are quoted in sentences."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    yield from re.findall(r"`workhorse ([a-z][^`]*)`", text)


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_verbs_and_options_in_sentences_exist(page: str):
    for line in inline_commands(page):
        words = " ".join(line.split()).split()
        with click.Context(command) as context:
            found: click.Command | None = command
            while isinstance(found, click.Group) and words:
                found = found.get_command(context, words.pop(0))
            assert found is not None, line
            known = {name for option in found.params for name in option.opts}
        options = {word.strip("[]()").partition("=")[0] for word in words if "--" in word[:3]}
        assert options <= known | {"--help"}, f"{page}: workhorse {line}"


KEY = re.compile(r"`((?:\w+\.)*\w+)(?:: ([^`]+))?`")
"""A recipe key in a sentence, and its value."""
TOP = {"model", "train", "data", "tokenizer", "parallel", "adapter"}
LAYER = f"model.blocks.{NAME}"
PARTS = {"attention", "feed_forward", "norm"}


@pytest.mark.parametrize("page", ["docs/from-texts.md", "docs/glossary.md"])
def test_recipe_keys_in_sentences_exist(page: str):
    """Keys of a layer are written without their beginning; kinds in values are checked too."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    checked = 0
    for written, value in KEY.findall(text):
        first = written.partition(".")[0]
        if first not in TOP | PARTS or (written in TOP | PARTS | {LAYER} and not value):
            continue
        name = f"{LAYER}.{written}" if first in PARTS else written
        place, _, key = name.rpartition(".")
        assert any(key in config.model_fields for config in configs_at(Recipe, place).values()), (
            name
        )
        given = yaml.safe_load(value or "null")
        if kinds := configs_at(Recipe, name) if given else None:
            fields = given if isinstance(given, dict) else {"kind": given}
            assert fields.keys() <= kinds[fields["kind"]].model_fields.keys(), f"{name}: {value}"
        checked += 1
    assert checked > 20


LINKING = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in LINKING))
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text("utf-8")):
        file, _, anchor = target.partition("#")
        there = (ROOT / page).parent / file if file else ROOT / page
        assert there.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {target}"


def test_names_are_in_the_source_files_that_pages_link():
    in_file = re.compile(r"((?:`\w+`,? (?:and )?)+)[^`\[]*in \[`[^`]+`\]\(([^)]+\.py)\)")
    for page in PAGES:
        text = " ".join((ROOT / page).read_text("utf-8").split())
        for names, file in in_file.findall(text):
            source = ((ROOT / page).parent / file).read_text("utf-8")
            for name in re.findall(r"\w{3,}", names.replace("and ", "")):
                assert re.search(rf"^(class|def) {name}\b", source, re.M), (
                    f"{page}: {name} in {file}"
                )


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_a_recipes_places_are_known():
    assert config_at(f"model.blocks.{NAME}.feed_forward", "moe").__name__ == "MoEConfig"
