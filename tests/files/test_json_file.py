"""Untrusted JSON files: read exactly and within limits, or refused with a one-line error."""

import gc

import pytest

from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import MAX_DEPTH, MAX_VALUES, parse_json, read_json


def test_an_object_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2.5, null, true], "ä": {"b": "c"}}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, True], "ä": {"b": "c"}}


def test_a_file_may_be_as_long_as_the_limit_and_no_longer(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path, limit=8) == {"a": 1}
    with pytest.raises(WorkhorseError, match=r"config.json is larger than 7 bytes"):
        read_json(path, limit=7)
    with pytest.raises(WorkhorseError, match=r"other.json is missing"):
        read_json(tmp_path / "other.json")


def test_depth_and_number_of_values_up_to_the_limit():
    deep = MAX_DEPTH - 1
    assert parse_json(b'{"a":' + b"[" * deep + b"]" * deep + b"}", "it")
    with pytest.raises(WorkhorseError, match=r"^it is nested deeper than 64$"):
        parse_json(b'{"a":' + b"[" * (deep + 1) + b"]" * (deep + 1) + b"}", "it")
    many = MAX_VALUES - 2
    assert len(parse_json(b'{"a":[' + b"1," * many + b"1]}", "it")["a"]) == many + 1
    with pytest.raises(WorkhorseError, match=r"^it has more than 850000 values"):
        parse_json(b'{"a":[' + b"1," * (many + 1) + b"1]}", "it")
    assert parse_json(b'{"a":[1,2]}', "it", max_values=3)
    with pytest.raises(WorkhorseError, match=r"^it has more than 2 values"):
        parse_json(b'{"a":[1,2]}', "it", max_values=2)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "it is not valid JSON: the key 'b' occurs twice"),
        (b'{"a": -Infinity}', "it is not valid JSON: -Infinity is not a JSON number"),
        (b'{"a": -1e400}', "it is not valid JSON: '-1e400' is too large for a float"),
        (b'{"a": 1} x', "it is not valid JSON: Extra data at column 10"),
        (b'"a"', "it is 'a', not a JSON object"),
        (b"\xff\xfe{}", "it is not UTF-8: bad byte at offset 0"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it is not valid JSON: Exceeds the limit"),
        (b"[" * 100_000, "it is nested deeper than 64"),
    ],
)
def test_what_is_refused(raw, message):
    with pytest.raises(WorkhorseError) as refusal:
        parse_json(raw, "it")
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
    assert gc.isenabled()
