import random

import pytest

from workhorse.evaluate import compressed_bits_per_byte


def test_it_is_what_the_programs_make_of_the_joined_files():
    """The expected sizes are the output of `gzip -9 | wc -c` and `xz -9 | wc -c`: 35 and 84."""
    texts = ["abcabcabc" * 100, "", "é" * 50]
    n_bytes = 900 + 100
    got = compressed_bits_per_byte(texts)
    assert got == compressed_bits_per_byte(["".join(texts)])
    assert got["gzip"] * n_bytes / 8 == pytest.approx(35)
    assert got["xz"] * n_bytes / 8 == pytest.approx(84)


def test_noise_does_not_compress():
    noise = "".join(chr(random.Random(i).randrange(128)) for i in range(5000))
    got = compressed_bits_per_byte([noise])
    assert 7 < got["gzip"] < 8
    assert 7 < got["xz"] < 8.2


def test_nothing():
    assert compressed_bits_per_byte([]) == {"gzip": 0.0, "xz": 0.0}
