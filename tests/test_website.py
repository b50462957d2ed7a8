"""The site: every page is in its navigation, and the walk explains every line of a forward pass."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from tests.nn.grid import COVERING
from website import drawings, walk
from website.build import ROOT, for_site, navigation

NN = walk.SOURCE / "nn"


def pages_in(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, dict):
            inner = next(iter(item.values()))
            yield from [inner] if isinstance(inner, str) else pages_in(inner)
        else:
            yield item


def test_every_page_is_in_the_navigation_once():
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    listed = [page for page in pages_in(navigation(ROOT / "docs")) if "repository/" not in page]
    assert sorted(listed) == sorted(docs)


def test_explanations_and_source_agree():
    assert walk.problems() == []


def test_a_changed_or_new_statement_is_reported():
    (file, name, steps), *_ = walk.walked()
    changed = [{**steps[0], "code": steps[0]["code"].replace("self", "other")}, *steps[1:]]
    for wrong in (changed, steps[1:], [*steps, steps[-1]]):
        with pytest.raises(ValueError, match=f"{file} {name}: "):
            walk.explained(file, name, wrong)


def test_the_walk_and_the_course_link_each_other():
    names = {path.stem for path in walk.COURSE.glob("[0-9]*.md")}
    for page, content in walk.WALKS.items():
        assert set(content["course"]) <= names
        for name in content["course"]:
            assert f"](../course/{name}.md)" in walk.pages()[f"walk/{page}.md"]
            assert f"[{content['title']}](../walk/{page}.md)" in walk.beside(name)
    assert walk.beside("12-sampling") == ""


def test_the_pictures_of_the_course_show_its_numbers():
    for name, content in drawings.drawings().items():
        stored = (drawings.COURSE / name).read_text("utf-8")
        assert stored == content, "run `python -m website.drawings`"
    assert drawings.numbers("05-positions.md", "(0.25") == [[0.25, 0.0625, 0.015625, 0.00390625]]


@pytest.mark.parametrize(
    "words", ["FlashDecoding", "Gemini", "StoryWriter", "position 2017 sinusoidal", "1.3 words"]
)
def test_a_section_has_all_words_of_a_search(words: str):
    pages = (path.read_text("utf-8").lower() for path in (ROOT / "docs").rglob("*.md"))
    sections = (section for page in pages for section in re.split(r"^#+ ", page, flags=re.M))
    assert any(all(word in section for word in words.lower().split()) for section in sections)


def test_outputs_are_marked_on_the_site():
    text, _ = for_site("```python\nprint(1)\n```\n\n```text\n1\n```\n", "docs/python.md")
    assert text == "```python\nprint(1)\n```\n\n```{.text .output}\n1\n```\n"


@contextmanager
def recorded(lines: set[tuple[CodeType, int]]) -> Iterator[None]:
    """Add the lines of `nn` that are executed inside."""

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        lines.add((frame.f_code, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return on_line if frame.f_code.co_filename.startswith(str(NN)) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


@torch.no_grad()
def lines_of_passes() -> set[tuple[CodeType, int]]:
    """Lines that half of the grid executes: plain passes, with documents, and with a cache."""
    lines: set[tuple[CodeType, int]] = set()
    for number, config in enumerate(COVERING[::2]):
        decoder = config.build("eager" if number % 2 else "auto")
        causal = all(block.attention.causal for block in config.blocks.values())
        cache = decoder.new_cache(1, 12) if causal else None
        tokens = torch.arange(12)[None] % config.vocab_size
        with recorded(lines):
            decoder(tokens, documents=tokens // 5)
            if cache is None:
                decoder(tokens)
            else:
                decoder.next_logits(tokens[:, :8], cache=cache)
                decoder.next_logits(tokens[:, 8:9], cache=cache)
    return lines


def test_the_walk_explains_every_line_of_a_forward_pass():
    explained = {
        f"{file} {name}": walk.functions(file)[name].statements for file, name, _ in walk.walked()
    }
    called: set[str] = set()
    missing: set[str] = set()
    for code, line in lines_of_passes():
        file = Path(code.co_filename).relative_to(walk.SOURCE).as_posix()
        function = f"{file} {code.co_qualname.partition('.<locals>')[0]}"
        called.add(function)
        statements = explained.get(function, [])
        if function not in walk.EXCLUDED and not any(
            one.first <= line <= one.last for one in statements
        ):
            missing.add(f"{function}, line {line}")
    assert missing == set(), "explain these lines in website/walk"
    # FlexAttention is explained too, and the slopes that a model computes when it is built.
    assert {name for name in explained.keys() - called if " Flex." not in name} == {
        "nn/positions/absolute.py alibi_slopes"
    }
    assert walk.EXCLUDED.keys() <= called
