from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workhorse.generate.checks import StopScanner, TextStream


def scan(stops, pieces) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    out = [scanner.push(piece) for piece in pieces]
    return [*out, scanner.finish()], scanner.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stopped"),
    [
        (["END"], ["abENDcd"], ["ab", ""], True),
        (["END"], ["ab", "E", "N", "D", "cd"], ["ab", "", "", "", "", ""], True),
        (["END"], ["abE", "N", "x"], ["ab", "", "ENx", ""], False),
        (["END"], ["abEN"], ["ab", "EN"], False),  # text held back is returned at the end
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], True),
        (["bcd", "c"], ["abcd"], ["ab", ""], True),  # the stop that ends first
        (["bcd", "cd"], ["abcd"], ["a", ""], True),  # the longest of those that end together
        ([], ["ab"], ["ab", ""], False),
    ],
)
def test_text_before_the_stop_comes_out(stops, pieces, expected, stopped):
    assert scan(stops, pieces) == (expected, stopped)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_how_the_text_is_cut_does_not_matter(text, stops, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole, stopped = scan(stops, [text])
    out, stopped_in_pieces = scan(stops, pieces)
    assert "".join(out) == "".join(whole)
    assert stopped == stopped_in_pieces == any(stop in text for stop in stops)
    # The text shown at any time is a prefix of the final text: nothing is taken back.
    assert "".join(whole).startswith("".join(out[:-1]))
    assert not any(stop in "".join(whole) for stop in stops)


def test_a_character_is_never_split(pieces):
    euro = "€".encode()
    tokenizer = pieces([euro[:1], euro[1:2], euro[2:], b"a"])
    stream = TextStream(tokenizer.stream(), [])
    assert [stream.push(token) for token in (3, 0, 1, 2, 3)] == ["a", "", "", "€", "a"]
    stream.push(0)
    assert stream.finish() == "\ufffd"


def test_what_looked_like_a_stop_comes_out_at_the_end(pieces):
    stream = TextStream(pieces([b"a", b"b"]).stream(), ["ab!"])
    assert [stream.push(token) for token in (0, 0, 1)] == ["", "a", ""]
    assert stream.finish() == "ab"
