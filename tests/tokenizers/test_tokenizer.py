"""Encoding and decoding: round trips, special tokens, streams."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tests.tokenizers import hf_trainers
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import Tokenizer

Trained = Callable[[str], Tokenizer]

SPACE = "\u2581"
texts = st.text(max_size=60) | st.text(alphabet="ab <|>s/eox041[]UNK \n\u2581é東", max_size=40)

NASTY = [
    "<s>",
    "</s>x<s><s>",
    "<unk><pad>",
    "[UNK] [PAD]",
    "<0x41><0xE6>",
    "<|eos|>",
    "a<|user|>b<|end|><|assistant|>",
    "<|bos|><|pad|><|unk|>",
    "<<s>>",
    "<|<|eos|>eos|>",
    " <s> ",
    f"{SPACE}<s>{SPACE}",
    "<s\u200b>",
]


@given(text=texts)
@example(text=" leading and trailing ")
@example(text="  ")
@example(text="\r\n\t\x00")
def test_any_text_comes_back_but_for_the_visible_space(lossless: Tokenizer, text: str) -> None:
    back = lossless.decode(lossless.encode(text))
    assert back == text.replace(SPACE, " ")  # SentencePiece treats U+2581 as a space


@pytest.mark.parametrize("name", ["bpe", "bytes"])
@given(data=st.binary(max_size=60))
@example(data=b"caf\xc3")
@example(data=b"\xff\xfe<|eos|>\xe6\x9d")
def test_any_bytes_come_back_from_a_byte_level_tokenizer(
    trained: Trained, name: str, data: bytes
) -> None:
    tokenizer = trained(name)
    ids = tokenizer.encode_bytes(data)
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def prefixed() -> hf_trainers.Tokenizer:
    """BPE over bytes that adds a space before the input, as in RoBERTa and Falcon."""
    tokenizer = hf_trainers.byte_level(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


CONTINUED: dict[str, Callable[[], hf_trainers.Tokenizer]] = {
    "prefix space": prefixed,
    "prepend": lambda: hf_trainers.byte_fallback(["<s>"], legacy=True),
    "first word": lambda: hf_trainers.byte_fallback(["<s>"]),
    "no prefix": lambda: hf_trainers.byte_fallback(["<s>"], prefix=False),
    "numbers in groups": lambda: hf_trainers.byte_level(["<s>"], hf_trainers.LLAMA3_WORDS),
    "every word": hf_trainers.unigram_after_eos,
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_prompt_and_its_completion_are_the_two_strings(kind: str) -> None:
    """No space is added between them, and the prompt has the tokens that it has alone."""
    tokenizer = Tokenizer(CONTINUED[kind]().to_str())

    @given(text=st.text("abe 1\n(", max_size=6), more=st.text("abe 1\n)", min_size=1, max_size=6))
    @example(text="f(", more="x)")
    @example(text="The quick bro", more="wn fox")
    @example(text="The dog", more=" jumps")
    @example(text="12", more="34")
    @example(text="", more="The dog")
    @example(text=" ", more=" ")
    def check(text: str, more: str) -> None:
        first, second = tokenizer.encode_parts(text, more)
        assert first == tokenizer.encode(text)
        whole = tokenizer.encode(text + more)
        assert tokenizer.decode([*first, *second]) == tokenizer.decode(whole)
        if whole[: len(first)] == first:
            assert [*first, *second] == whole

    check()


def test_no_space_is_added_between_text_and_single_bytes() -> None:
    tokenizer = Tokenizer(prefixed().to_str())
    for data in (b"\xffx)", b"f(\xffx)\xff 2"):
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)).removeprefix(b" ") == data


def test_bytes_that_are_text_encode_as_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_bytes("naïve 東京".encode()) == tokenizer.encode("naïve 東京")


def test_bytes_that_are_no_text_need_a_byte_level_tokenizer(trained: Trained) -> None:
    with pytest.raises(WorkhorseError, match="use a byte-level tokenizer"):
        trained("characters").encode_bytes(b"\xff")


def test_byte_values_are_the_ids_of_the_byte_tokenizer(trained: Trained) -> None:
    assert trained("bytes").encode("é!") == list("é!".encode())
    assert trained("bytes").eos_id == 256


@pytest.mark.parametrize("text", NASTY)
def test_typed_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    for surrounded in (text, f"x{text}", f"{text} y", f" {text}\n", text.upper(), text * 2):
        controls = set(tokenizer.special_tokens.values()) - {tokenizer.unk_id}
        assert controls.isdisjoint(tokenizer.encode(surrounded))


@settings(max_examples=40)
@given(text=texts, name=st.sampled_from(NASTY))
def test_no_context_makes_a_control_token_either(
    tokenizer: Tokenizer, text: str, name: str
) -> None:
    controls = set(tokenizer.special_tokens.values()) - {tokenizer.unk_id}
    assert controls.isdisjoint(tokenizer.encode(text + name + text))


def test_a_typed_unk_is_no_unknown_token(trained: Trained) -> None:
    """`[UNK]` and `<unk>` consist of known characters."""
    for name, typed in (("wordpiece", "[UNK]"), ("unigram", "<unk>"), ("characters", "<|unk|>")):
        tokenizer = trained(name)
        assert tokenizer.unk_id is not None
        assert tokenizer.unk_id not in tokenizer.encode(typed)


def test_a_typed_byte_token_is_no_byte(lossless: Tokenizer) -> None:
    assert lossless.decode(lossless.encode("<0x41>")) == "<0x41>"


def test_special_tokens_are_found_when_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_id is not None
    (eos,) = (
        name for name, number in tokenizer.special_tokens.items() if number == tokenizer.eos_id
    )
    ids = tokenizer.encode(f"dog{eos}", allow_special=True)
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids, skip_special=True) == "dog"
    assert tokenizer.decode(ids).endswith(eos)
    # The option of one call does not affect the next.
    assert tokenizer.eos_id not in tokenizer.encode(f"dog{eos}")


def test_an_unknown_character_is_unk(trained: Trained) -> None:
    tokenizer = trained("characters")
    assert tokenizer.encode("ǂ") == [tokenizer.unk_id]


def test_a_stream_gives_the_text_of_all_ids(tokenizer: Tokenizer) -> None:
    text = "The fox 🦊 über 東京, <s>jumps</s>!\n  हिन्दी "
    ids = [*tokenizer.encode(text), tokenizer.vocab_size - 1]
    for start in range(3):
        stream = tokenizer.stream()
        parts = [stream.push(number) for number in ids[start:]]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids[start:])


@settings(max_examples=40)
@given(data=st.data())
def test_a_stream_of_any_ids_is_their_text_and_takes_nothing_back(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip_special in (False, True):
        stream = tokenizer.stream(skip_special=skip_special)
        text = "".join(map(stream.push, ids))
        whole = tokenizer.decode(ids, skip_special=skip_special)
        assert whole.startswith(text)
        assert text + stream.finish() == whole


def test_a_stream_holds_half_a_character_back(trained: Trained) -> None:
    stream = trained("bytes").stream()
    assert [stream.push(byte) for byte in "é🦊".encode()] == ["", "é", "", "", "", "🦊"]
    assert stream.push(0xF0) == ""
    assert stream.finish() == "\ufffd"


def test_a_stream_goes_on_after_a_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The lazy dog, jumps over")
    for cut in range(1, len(ids)):
        stream = tokenizer.stream(after=ids[:cut])
        text = "".join(map(stream.push, ids[cut:])) + stream.finish()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_decoding_is_the_library_s(tokenizer: Tokenizer) -> None:
    """Decoding equals the library's for valid UTF-8; the library replaces invalid bytes singly."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(tokenizer.definition)
    for text in ("The fox 🦊 über 東京", " <s> x", "  a  b", "naïve café", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_batches_are_the_same_as_one_by_one(tokenizer: Tokenizer) -> None:
    some = ["The dog", "", "jumps 123 <s>"]
    ids = tokenizer.encode_batch(some)
    assert ids == [tokenizer.encode(text) for text in some]
    assert tokenizer.decode_batch(ids) == [tokenizer.decode(one) for one in ids]
    assert tokenizer.encode_batch([]) == []


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkhorseError, match=r"has a lone surrogate, '\\ud83e', at character 2"):
        tokenizer.encode("ab\ud83e")


@pytest.mark.parametrize("number", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, number: int) -> None:
    with pytest.raises(WorkhorseError, match=f"token id {number} is not in the vocabulary of"):
        tokenizer.decode([number])


def test_an_id_without_a_token_has_no_bytes(tokenizer: Tokenizer) -> None:
    """Rows of an embedding beyond the vocabulary have ids too."""
    size = tokenizer.vocab_size
    assert [tokenizer.display_bytes(token) for token in (-1, size, size + 9)] == [None] * 3
    for name, token in tokenizer.special_tokens.items():
        assert tokenizer.display_bytes(token) == name.encode()
    (token, *_) = tokenizer.encode("The")
    assert tokenizer.display_bytes(token) == tokenizer.token_bytes(token)


@pytest.mark.parametrize("text", [5, None, b"a", ["a", "b"], ("a", "b")])
def test_what_is_no_text_is_not_encoded(tokenizer: Tokenizer, text: Any) -> None:
    """The library would encode a pair of strings as one sequence."""
    line = r"^.* is not a string; pass a str$"
    for encode in (
        tokenizer.encode,
        tokenizer.encode_sequence,
        lambda one: tokenizer.encode_batch([one]),
    ):
        with pytest.raises(WorkhorseError, match=line):
            encode(text)


@pytest.mark.parametrize("texts", ["ab", 5, None])
def test_a_batch_of_texts_is_a_list(tokenizer: Tokenizer, texts: Any) -> None:
    with pytest.raises(WorkhorseError, match=r"texts=.* is not a list of strings; pass a list$"):
        tokenizer.encode_batch(texts)


def test_a_text_is_not_encoded_as_bytes(trained: Trained) -> None:
    with pytest.raises(
        WorkhorseError, match="'a' is not bytes; pass bytes, or use encode for a str"
    ):
        trained("bytes").encode_bytes("a")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("ids", ["12", b"12", 5, None, ["1"], [1, 1.5, 2], [[1, 2]]])
def test_what_is_no_list_of_ids_is_not_decoded(trained: Trained, ids: Any) -> None:
    tokenizer = trained("bytes")
    after = lambda some: tokenizer.stream(after=some)  # noqa: E731
    for decode in (tokenizer.decode, tokenizer.decode_bytes, tokenizer.pieces, after):
        with pytest.raises(WorkhorseError, match="is not a list of integer token ids; pass"):
            decode(ids)


def test_ids_of_an_array_are_ids(trained: Trained) -> None:
    assert trained("bytes").decode(np.array([104, 105])) == "hi"  # pyright: ignore


@pytest.mark.parametrize("name", [5, None, b"a"])
def test_what_is_no_name_names_no_token(trained: Trained, name: Any) -> None:
    bpe = trained("bpe")
    for use in (bpe.token_id, bpe.with_prefix, lambda one: bpe.with_role("bos", one)):
        with pytest.raises(WorkhorseError, match=r"token=.* is not a string; pass a str"):
            use(name)


def test_an_unknown_token_names_the_special_ones(trained: Trained) -> None:
    with pytest.raises(
        WorkhorseError, match=r"token '<\|tool\|>' is not in .* tokens: <\|bos\|>, "
    ):
        trained("bpe").token_id("<|tool|>")


def test_a_copy_for_another_process_is_as_careful(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    for text in NASTY:
        assert copy.encode(text) == tokenizer.encode(text)


def test_the_fingerprint_follows_what_decides_the_ids(trained: Trained) -> None:
    bpe = trained("bpe")
    same = Tokenizer(bpe.definition, bpe.roles)
    other_eos = Tokenizer(bpe.definition, {**bpe.roles, "eos": "<|end|>"})
    assert same.fingerprint == bpe.fingerprint
    assert len({bpe.fingerprint, other_eos.fingerprint, trained("bytes").fingerprint}) == 3
