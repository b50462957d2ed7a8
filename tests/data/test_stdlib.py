from pathlib import Path

import pytest

from workhorse.data import DataConfig, read_documents, stdlib
from workhorse.data.stdlib import unlike

BODY = [f"line {i} says what line {i} says" for i in range(40)]


def test_the_standard_library_without_its_tests() -> None:
    names = [module.name for module in stdlib.candidates()]
    assert {"os", "json", "json.decoder", "asyncio.events"} <= set(names)
    for name in names:
        assert {"test", "tests", "idle_test", "site-packages"}.isdisjoint(name.split("."))
    paths = [module.path.as_posix() for module in stdlib.candidates()]
    assert paths == sorted(paths)


def test_code_pages_that_repeat_one_another_are_left_out() -> None:
    kept = {module.name for module in stdlib.modules()}
    assert {"os", "json", "encodings.utf_8"} <= kept
    pages = [m.name for m in stdlib.candidates() if m.name.startswith("encodings.iso8859_")]
    assert len(kept.intersection(pages)) < len(pages) / 2


def test_every_module_is_in_one_split() -> None:
    source = DataConfig(corpus="stdlib").corpus
    train, held = (
        [document.name for document in read_documents(source, split) if document.begins]
        for split in ("train", "validation")
    )
    assert sorted(train + held) == sorted(module.name for module in stdlib.modules())
    assert 0.05 < len(held) / len(train + held) < 0.2
    assert "json" in held  # the same modules on all machines


def test_each_name_is_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doc = '"""{} a documented thing of this module."""'
    path = tmp_path / "m.py"
    path.write_text(
        f"class A:\n    def close(self):\n        {doc.format('Method:')}\n"
        f"def close():\n    {doc.format('Function:')}\n"
        f"class Close:\n    {doc.format('Class:')}\n"
    )
    monkeypatch.setattr(stdlib, "modules", lambda: [stdlib.Module("m", path)])
    found = [fields["messages"] for _, fields in stdlib.questions("conversations")]
    assert [[one["content"] for one in messages] for messages in found] == [
        ["What is m.close?", f"`close` is a function of `m`. {doc.format('Function:')[3:-3]}"],
        ["What does m.Close do?", f"`Close` is a class of `m`. {doc.format('Class:')[3:-3]}"],
    ]


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["\n".join(BODY), "\n".join(BODY)], [0]),
        (["\n".join(BODY), "\n\n  ".join(BODY)], [0]),  # white space does not count
        (["\n".join(BODY), "\n".join([*BODY[:30], *"abcdefghij"])], [0]),
        (["\n".join(BODY), "\n".join([*BODY[:10], *map(str, range(30))])], [0, 1]),
        (["", "\n \n", "x"], [2]),
        (["x", "x"], [0]),
    ],
)
def test_near_duplicates_of_an_earlier_text_are_left_out(texts: list[str], kept: list[int]) -> None:
    assert list(unlike(texts)) == kept
