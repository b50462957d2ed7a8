"""The figures compared with a naive sum that uses one forward pass per token."""

import math

import pytest
import torch

from workhorse.data.documents import Document
from workhorse.errors import WorkhorseError
from workhorse.evaluate import evaluate
from workhorse.evaluate.scoring import Question, score
from workhorse.model.load import load
from workhorse.nn import DecoderConfig

TEXTS = ["the quick brown fox", "jumps", "x", "over the lazy dog, again and again"]
DOCUMENTS = [Document(str(number), text) for number, text in enumerate(TEXTS)]
N_BYTES = sum(len(text) for text in TEXTS)
START = 0


@torch.no_grad()
def naive(
    decoder, text: str, start: int | None, stride: int, context: int | None = None
) -> list[float]:
    """Return the nats of each predicted token; it sees the tokens since the start of its window."""
    tokens = ([] if start is None else [start]) + [ord(character) for character in text]
    context, nats = context or decoder.max_seq_len, []
    for target in range(1, len(tokens)):
        windows_before = max(0, math.ceil((target - context) / stride))
        seen = tokens[windows_before * stride : target]
        logits = decoder(torch.tensor([seen]))[0, -1]
        nats.append(-logits.log_softmax(-1)[tokens[target]].item())
    return nats


@pytest.mark.parametrize("stride", [8, 5, 1])
@pytest.mark.parametrize("start", [START, None])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_loss_and_bits_per_byte(decoder, ascii_tokenizer, stride, start, batch_size):
    result = evaluate(
        decoder, ascii_tokenizer, DOCUMENTS, start=start, stride=stride, batch_size=batch_size
    )
    nats = [nat for text in TEXTS for nat in naive(decoder, text, start, stride)]
    assert result.tokens == len(nats) == N_BYTES - (0 if start is not None else len(TEXTS))
    assert result.loss == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    # A first token without prediction costs the bits of a uniform guess.
    unpredicted = 0 if start is not None else len(TEXTS)
    bits = (sum(nats) / math.log(2) + unpredicted * math.log2(128)) / N_BYTES
    assert result.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert (result.bytes, result.documents, result.unpredicted) == (N_BYTES, 4, unpredicted)


def test_a_model_evaluates_strings(run_folder):
    model = load(run_folder)
    expected = evaluate(model.decoder, model.text, DOCUMENTS, start=model.start, stride=4)
    assert model.evaluate(iter(TEXTS), stride=4) == expected
    for wrong in ("one string", ["fine", 3]):
        with pytest.raises(WorkhorseError, match="is not a list of strings; pass one"):
            model.evaluate(wrong)


def test_overlap_lets_tokens_see_more(decoder, ascii_tokenizer):
    plain = evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START)
    assert plain == evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START, stride=8)
    overlapping = evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START, stride=2)
    assert overlapping.loss != plain.loss
    assert overlapping.tokens == plain.tokens


def test_a_shorter_context(decoder, ascii_tokenizer):
    found = evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START, context=5, stride=3)
    nats = [nat for text in TEXTS for nat in naive(decoder, text, START, 3, context=5)]
    assert found.loss == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert found.tokens == N_BYTES


def test_bytes_are_those_of_utf_8(decoder, ascii_tokenizer):
    result = evaluate(decoder, ascii_tokenizer, [Document("a", "é€")], start=START)
    assert (result.tokens, result.bytes) == (2, 5)


def test_unknown_characters_are_told(decoder, ascii_tokenizer):
    assert evaluate(decoder, ascii_tokenizer, [Document("a", "aéb€")], start=START).unknown == 2
    assert evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START).unknown == 0


def test_the_pieces_of_a_long_document_are_one_text(decoder, ascii_tokenizer):
    pieces = [
        Document("a", TEXTS[0][:7], begins=True, ends=False),
        Document("a", TEXTS[0][7:9], begins=False, ends=False),
        Document("a", TEXTS[0][9:], begins=False, ends=True),
        *DOCUMENTS[1:],
    ]
    for start in (START, None):
        whole = evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=start, stride=5)
        assert evaluate(decoder, ascii_tokenizer, pieces, start=start, stride=5) == whole


def test_progress_tells_the_bytes_read(decoder, ascii_tokenizer):
    seen = []
    evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START, progress=seen.append)
    assert seen == [19, 24, 25, 59]


def test_dropout_is_off_and_the_mode_is_restored(decoder, ascii_tokenizer):
    expected = evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START)
    decoder.train()
    assert evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START) == expected
    assert decoder.training


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {"start": START}, "the documents are too short: 0 bytes have no token"),
        (
            [Document("a", "x")],
            {"start": None},
            "the documents are too short: 1 bytes have no token",
        ),
        (DOCUMENTS, {"start": 0, "stride": 9}, "stride=9 is not within the context; choose 1 to 8"),
        (DOCUMENTS, {"start": 0, "stride": 0}, "stride=0 is not within the context"),
        (DOCUMENTS, {"start": 0, "context": 9}, "context=9 is not within the model's max_seq_len"),
        (DOCUMENTS, {"start": 0, "context": 0}, "context=0 is not within .* choose 1 to 8"),
        (DOCUMENTS, {"start": 0, "context": 4, "stride": 5}, "stride=5 is not .* choose 1 to 4"),
        (DOCUMENTS, {"start": 0, "batch_size": 0}, "batch_size=0 is not positive"),
    ],
)
def test_what_cannot_be_evaluated(decoder, ascii_tokenizer, documents, options, message):
    with pytest.raises(WorkhorseError, match=f"^{message}"):
        evaluate(decoder, ascii_tokenizer, documents, **options)


def test_damaged_weights_are_reported(decoder, ascii_tokenizer):
    with torch.no_grad():
        decoder.final_norm.weight[0] = torch.nan
    with pytest.raises(WorkhorseError, match="not a finite number"):
        evaluate(decoder, ascii_tokenizer, DOCUMENTS, start=START)


def test_a_model_that_sees_the_answers_is_refused(decoder, ascii_tokenizer):
    fields = decoder.config.to_dict()
    fields["blocks"]["main"]["attention"]["causal"] = False
    bidirectional = DecoderConfig.from_dict(fields).build()
    with pytest.raises(WorkhorseError, match="block 'main' is not causal, so it sees the tokens"):
        evaluate(bidirectional, ascii_tokenizer, DOCUMENTS, start=START)


@pytest.mark.parametrize("kind", ["dynamic_ntk", "longrope"])
def test_windows_and_questions_are_measured_alone_where_angles_depend_on_the_length(
    decoder, ascii_tokenizer, kind
):
    scaling = {"kind": kind, "factor": 4.0, "original_max_seq_len": 3}
    if kind == "longrope":
        scaling |= {"short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [4, 5, 6, 7]}
    fields = decoder.config.to_dict()
    fields["blocks"]["main"]["attention"]["position"] = {"kind": "rope", "scaling": scaling}
    torch.manual_seed(0)
    stretched = DecoderConfig.from_dict(fields).build(dtype=torch.float64)
    alone, together = (
        evaluate(stretched, ascii_tokenizer, DOCUMENTS, start=START, batch_size=size).loss
        for size in (1, 16)
    )
    assert together == pytest.approx(alone, rel=1e-6)
    questions = [Question([1, 2], [3]), Question([4] * 5, [5, 6]), Question([7], [8])]
    one, all_of_them = (
        {
            number: s.logprob
            for some in score(stretched, questions, batch_size=size)
            for number, s in some
        }
        for size in (1, 3)
    )
    assert all_of_them == pytest.approx(one, rel=1e-6)
