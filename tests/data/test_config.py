from pathlib import Path

import pytest

from workhorse.config.base import ConfigError
from workhorse.data import DataConfig

MIXTURE = {
    "kind": "mixture",
    "sources": {"code": "stdlib", "prose": {"kind": "text", "path": "prose.txt"}},
    "weights": {"code": 3},
}


@pytest.mark.parametrize(
    "corpus",
    [
        "stdlib",
        "stdin",
        {"kind": "text", "path": "a.txt", "validation_fraction": 0.2, "errors": "replace"},
        {"kind": "folder", "path": "texts", "glob": "*.md", "validation": "held"},
        {"kind": "jsonl", "path": "a.jsonl.zst", "text_field": "content"},
        {"kind": "parquet", "path": "shards"},
        MIXTURE,
    ],
)
def test_configs_round_trip(corpus: object) -> None:
    config = DataConfig(corpus=corpus, packing="documents", cache_dir="cache")
    assert DataConfig.from_yaml(config.to_yaml()) == config
    assert DataConfig.from_json(config.to_json()) == config


def test_names_stand_for_the_corpora_that_need_no_more() -> None:
    assert DataConfig(corpus="stdlib") == DataConfig(corpus={"kind": "stdlib"})
    assert DataConfig(corpus="stdin").corpus.path == Path("-")


def test_sources_of_a_mixture_weigh_one_unless_told() -> None:
    config = DataConfig(corpus=MIXTURE)
    assert config.weights == {"code": 3.0, "prose": 1.0}
    assert list(config.sources) == ["code", "prose"]


@pytest.mark.parametrize(
    ("corpus", "line"),
    [
        ("stdlb", "corpus: unknown kind 'stdlb'; did you mean 'stdlib'?"),
        (
            "t.txt",
            "corpus: 't.txt' is a path, not a kind of corpus; write {kind: text, path: t.txt}",
        ),
        ("b.jsonl", "write {kind: jsonl, path: b.jsonl}"),
        ("data/new", "write {kind: text, path: data/new}"),
        (
            {"kind": "mixture", "sources": {"a": "c.parquet"}},
            "'c.parquet' is a path, not a kind of corpus; write {kind: parquet, path: c.parquet}",
        ),
        ({"kind": "text"}, "corpus: 'path' is missing; give the path of a file or folder"),
        (
            {"kind": "text", "path": "a", "documents": ""},
            "corpus.documents: '' separates nothing; use lines or another string",
        ),
        ({"kind": "text", "path": "a", "glob": "*"}, "corpus: unknown key 'glob'; known: "),
        (
            {"kind": "text", "path": "a", "validation_fraction": 1.0},
            "corpus.validation_fraction: 1.0 is too large; give a number from 0 to below 1",
        ),
        (
            {"kind": "text", "path": "a", "validation": "b", "validation_fraction": 0.1},
            "corpus: validation and validation_fraction are both set; keep one",
        ),
        (
            {"kind": "text", "path": "a", "validation": "-"},
            "corpus: validation=- is not supported: stdin can only be training data; name a file",
        ),
        ({"kind": "mixture", "sources": {}}, "a mixture needs sources; name at least one"),
        ({"kind": "mixture", "sources": {"a/b": "stdlib"}}, "'a/b' is not a valid source name"),
        (
            {"kind": "mixture", "sources": {"a": "stdlib"}, "weights": {"b": 1}},
            r"'b' is not one of the sources \(a\)",
        ),
        (
            {"kind": "mixture", "sources": {"a": "stdlib"}, "weights": {"a": 0}},
            "corpus.weights.a: 0 is too small; give a number above 0",
        ),
    ],
)
def test_impossible_corpora_are_refused(corpus: object, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        DataConfig(corpus=corpus)
