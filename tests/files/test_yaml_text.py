"""Untrusted YAML: only plain data within limits on aliases, tags and depth."""

import pytest

from workhorse.files.text_formats import BadYaml, parse_yaml

MULTIPLIED = "a: &a [x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_and_merges_are_read() -> None:
    assert parse_yaml("a: &it {b: [1]}\nc: *it") == {"a": {"b": [1]}, "c": {"b": [1]}}
    merged = "a: &it {x: 1, y: 2}\nb:\n  y: 3\n  <<: *it\nc: {<<: [*it, {z: 4}]}"
    assert parse_yaml(merged)["b"] == {"x": 1, "y": 3}
    assert parse_yaml(merged)["c"] == {"x": 1, "y": 2, "z": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MULTIPLIED, "there are more than 100000 values with all aliases expanded"),
        ("{a: 1}\n" + "x" * 300_000, "300007 characters of YAML are more than 300000"),
        ("[" * 5000 + "]" * 5000, "line 1, column 65: it is nested deeper than 64"),
        ("{a: " * 5000, "it is nested deeper than 64"),
        ("a: &a [*a]", "line 1, column 4: an alias refers to itself"),
        ("a: &a\n  <<: *a", "an alias refers to itself"),
        ("a: {<<: [1]}", "expected a mapping for merging, but found scalar"),
        ("a: !!timestamp 2020-01-01", "line 1, column 4: '!!timestamp' is not supported"),
        ("a: !!set {b}", "'!!set' is not supported"),
        ("a: !!binary aGk=", "'!!binary' is not supported"),
        ("a: !!omap [b: 1]", "'!!omap' is not supported"),
        ("a: !!map b", "'!!map' is not supported"),
        ("a: !!int b", "'b' is not a valid int; remove the tag"),
        ("a: !!int 1:30", "'1:30' is not a valid int"),
        (f"a: {'9' * 5000}", "a number of 5000 digits is too large"),
        ('a: "\\ud800"', r"'\ud800' has an unpaired surrogate"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadYaml) as caught:
        parse_yaml(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_digits_of_other_scripts_are_text() -> None:
    assert parse_yaml("[1٢, 1.٢, 1٢e3]") == ["1٢", "1.٢", "1٢e3"]
