"""Training on conversations: the data that a step sees, its loss, and exact resuming."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.test_preparation import dies_after, files_of
from tests.train.chats import chat, chat_tokenizer, sums, write_lines
from tests.train.conftest import MODEL
from tests.train.runs import assert_reference_is_checked, assert_same_run, notices
from workhorse.data import Batch, Batches, Dataset, prepare, prepare_tokenizer
from workhorse.data.sources import describe_sources
from workhorse.errors import WorkhorseError
from workhorse.nn import IGNORE, DecoderConfig
from workhorse.run import train
from workhorse.tokenizers import Tokenizer
from workhorse.tokenizers.chat.template import DEFAULT_TEMPLATE, with_template
from workhorse.tokenizers.config import BytesConfig
from workhorse.train import Recipe, read_metrics, with_init
from workhorse.train.objectives.next_token import NextToken

Make = Callable[..., Recipe]
LOOKS = ("validation", "samples")


def _looks(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run / "metrics.jsonl") if event["kind"] in LOOKS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat_tokenizer()


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Make:
    tokenizer.save(tmp_path / "tokenizer")
    write_lines(tmp_path / "chats.jsonl", sums(24))

    def recipe(data: dict[str, Any] | None = None, **source: Any) -> Recipe:
        corpus = {"kind": "conversations", "path": str(tmp_path / "chats.jsonl"), **source}
        return Recipe.from_dict(
            {
                "name": "chat",
                "model": MODEL,
                "tokenizer": {"kind": "file", "path": str(tmp_path / "tokenizer")},
                "data": {"corpus": corpus, **(data or {})},
                "train": {
                    "steps": 6,
                    "batch_size": 4,
                    "seq_len": 32,
                    "log_every": 1,
                    "checkpoint_every": 3,
                    "samples": {"prompts": ["3+1?"], "every": 6, "max_new_tokens": 3},
                },
            }
        )

    return recipe


def prepared(recipe: Recipe, tokenizer: Tokenizer, folder: Path, lines: Any = print) -> Dataset:
    return prepare(recipe.data, tokenizer, folder, notify=lines)


def learned_text(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode([one for one in row if one != IGNORE]) for row in batch.targets.tolist()
    ]


def test_the_answers_and_their_ends_are_learned(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    recipe = make({"packing": "padded"}, validation_fraction=0.2)
    dataset = prepared(recipe, tokenizer, tmp_path)
    batches = Batches(dataset.train, seq_len=32, batch_size=24, packing="padded")
    texts = learned_text(batches[0], tokenizer)
    wanted = {f"{n + 1}<|end|>" + "yes<|end|>" * (n % 2) for n in range(24)}
    assert set(texts) < wanted
    assert dataset.validation is not None
    assert dataset.train.n_documents + dataset.validation.n_documents == 24
    last = make({"packing": "padded"}, learn="last", validation_fraction=0)
    batches = Batches(
        prepared(last, tokenizer, tmp_path).train, seq_len=32, batch_size=24, packing="padded"
    )
    assert set(learned_text(batches[0], tokenizer)) == {
        "yes<|end|>" if n % 2 else f"{n + 1}<|end|>" for n in range(24)
    }


def test_the_loss_is_the_mean_over_learned_tokens(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Packed and padded rows have the same sum and the same count, in float64."""
    decoder = DecoderConfig.from_dict(
        {**MODEL, "vocab_size": tokenizer.vocab_size, "max_seq_len": 64}
    ).build()
    objective = NextToken(decoder).double().eval()
    found: dict[str, Tensor] = {}
    for packing, rows in (("padded", 24), ("documents", 12)):
        dataset = prepared(make({"packing": packing}, validation_fraction=0), tokenizer, tmp_path)
        batches = Batches(dataset.train, seq_len=32, batch_size=rows, packing=packing)
        assert batches.rows_per_epoch == {"corpus": rows}
        loss, count, _ = objective(batches[0])
        found[packing] = torch.stack([loss, count])
    expected = torch.zeros(2, dtype=torch.float64)
    for record in sums(24):
        for number in range(1, len(record["messages"]), 2):
            given = "".join(
                f"<|{one['role']}|>{one['content']}<|end|>" for one in record["messages"][:number]
            )
            answer = f"{record['messages'][number]['content']}<|end|>"
            prompt = tokenizer.encode(f"{given}<|assistant|>", allow_special=True)
            ids = [*prompt, *tokenizer.encode(answer, allow_special=True)]
            logits = decoder(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            chosen = logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][len(prompt) - 1 :]
            expected += torch.stack([-chosen.sum(), torch.tensor(float(len(chosen)))])
    for sums_of in found.values():
        torch.testing.assert_close(sums_of, expected, rtol=1e-12, atol=0)


def test_a_run_resumes_bit_for_bit(make: Make, tmp_path: Path) -> None:
    recipe, told = make(), []
    result = train(recipe, tmp_path / "whole", on_event=told.append)
    assert result.validation_loss is not None
    assert result.bits_per_byte is None
    (event,) = [event for event in told if event["kind"] == "samples"]
    assert [sample["prompt"] for sample in event["samples"]] == ["3+1?"]
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(max((tmp_path / "resumed" / "checkpoints").glob("*6")))
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=6)


def test_what_is_left_out_is_said(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", [*sums(24), {"messages": chat("a" * 40, "b")}])
    told: list[dict[str, Any]] = []
    train(make(), tmp_path / "run", on_event=told.append)
    assert any("1 longer than 32 predictions" in line for line in notices(told))


def test_training_records_in_the_validation_file(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    held_out = write_lines(tmp_path / "held.jsonl", sums(5))
    lines: list[str] = []
    for overlap, left in (("keep", 24), ("drop", 19)):
        recipe = make(validation=str(held_out), overlap=overlap)
        dataset = prepared(recipe, tokenizer, tmp_path, lines.append)
        assert dataset.train.n_documents == left
    assert lines[0].startswith("5 training records are also in the validation data and stay; ")
    assert lines[1].endswith("validation data and are skipped")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": chat("a", "b", "c")}, "the last message is of the role user"),
        ({"messages": chat("a", "")}, "message 1 (assistant) is empty"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]},
            "message 1 has the role 'bot'; use one of assistant",
        ),
        (
            {"messages": [{**one, "weight": 0} for one in chat("a", "b")]},
            "all messages have weight 0",
        ),
        (
            {"messages": [{**one, "weight": -1} for one in chat("a", "b")]},
            "message 0: weight=-1 is not a number from 0 to 1e+15",
        ),
        (
            {"messages": [{**one, "weight": 1e39} for one in chat("a", "b")]},
            "message 0: weight=1e+39 is not a number from 0 to 1e+15",
        ),
    ],
)
def test_a_record_that_teaches_nothing_is_an_error(
    make: Make, tokenizer: Tokenizer, tmp_path: Path, record: Any, message: str
) -> None:
    write_lines(tmp_path / "chats.jsonl", [*sums(3), record])
    with pytest.raises(WorkhorseError) as raised:
        prepared(make(validation_fraction=0), tokenizer, tmp_path)
    assert f"chats.jsonl:4: {message}" in str(raised.value)


def test_a_tokenizer_with_role_tokens_gets_the_default_template(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bare = Tokenizer(tokenizer.definition, tokenizer.roles)
    assert with_template(bare).chat_templates == tokenizer.chat_templates
    assert with_template(tokenizer) is tokenizer
    plain = prepare_tokenizer(BytesConfig(), make().data, tmp_path)
    with pytest.raises(WorkhorseError, match=r"jsonl:\d+: conversations .* nor the special tokens"):
        prepared(make(), plain, tmp_path)
    write_lines(
        tmp_path / "chats.jsonl", [{"prompt": f"{n}+", "completion": "1"} for n in range(9)]
    )
    recipe = make().replace(tokenizer=BytesConfig())
    result = train(recipe, tmp_path / "strings")  # strings need no template, also for samples
    assert result.validation_loss is not None


BROKEN = {
    "system": {"messages": [{"role": "system", "content": "S"}, *chat("a", "b")]},
    "role": {"messages": [*chat("a"), {"role": "bob", "content": "b"}]},
    "empty": {"messages": [{}]},
    "fields": {"text": "a"},
}
NO_SYSTEM = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"


def read(dataset: Dataset) -> tuple[list[int], list[float], list[int]]:
    (stream,) = dataset.train.streams
    size = len(stream)
    return stream.read(0, size).tolist(), stream.read_weights(0, size).tolist(), [*stream.ends]


def test_records_that_cannot_be_used_are_skipped_and_counted(
    make: Make, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data set has the other records, also if its preparation is interrupted."""
    without_system = Tokenizer(tokenizer.definition, tokenizer.roles, NO_SYSTEM + DEFAULT_TEMPLATE)
    path, recipe = tmp_path / "chats.jsonl", make(on_error="skip", validation_fraction=0)
    good = path.read_text().splitlines(keepends=True)
    expected = read(prepared(make(validation_fraction=0), without_system, tmp_path / "good"))
    bad = ["{\n", *(f"{json.dumps(one)}\n" for one in BROKEN.values())] * 5
    path.write_text("".join(chain(*zip_longest(bad, good, fillvalue=""))))
    with pytest.raises(WorkhorseError, match="jsonl:1 is not JSON"):
        prepared(make(), without_system, tmp_path / "stop")
    monkeypatch.setattr("workhorse.data.preparation.SHARD_TOKENS", 1)
    monkeypatch.setattr("workhorse.data.encoding.BLOCK_PIECES", 3)
    (skip,), (stop,) = (describe_sources(one.data).values() for one in (recipe, make()))
    assert ("on_error" in stop, skip["on_error"]) == (False, "skip")  # as before the key
    told: list[str] = []
    for _ in range(2):  # prepared, then opened
        found = prepared(recipe, without_system, tmp_path / "skip", told.append)
        assert read(found) == expected
        assert told.pop().startswith(f"25 records are skipped, the first because of {path}:1 is")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", dies_after(20))
        with pytest.raises(KeyboardInterrupt):
            prepared(recipe, without_system, tmp_path / "killed")
    resumed = prepared(recipe, without_system, tmp_path / "killed")
    assert len(resumed.manifest.train["corpus"].shards) > 4
    assert files_of(resumed.folder) == files_of(found.folder)
    path.write_text("".join(bad))
    with pytest.raises(WorkhorseError, match="skips all records of the train split, the first"):
        prepared(recipe, without_system, tmp_path / "bad")


def test_both_answers_of_a_pair_are_skipped(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    yes, no = ([{"role": "assistant", "content": one}] for one in ("yes", "no"))
    call = [{**no[0], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    pairs = [{"prompt": chat("sure?"), "chosen": yes, "rejected": no}]
    both = [{**pairs[0], "chosen": call}, *pairs, {**pairs[0], "rejected": call}]
    found, told = [], []
    for name, records in (("good", pairs), ("both", both)):
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        recipe = make(rows="pairs", path=str(path), validation_fraction=0, on_error="skip")
        dataset = prepared(recipe, tokenizer, tmp_path, told.append)
        found.append((*read(dataset), dataset.train.streams[0].values.tolist()))
    assert found[0] == found[1]
    assert [line.split(",")[0] for line in told] == ["2 records are skipped"]


def test_a_run_of_dpo_starts_at_the_reference_and_resumes_bit_for_bit(
    make: Make, tmp_path: Path
) -> None:
    train(make(), tmp_path / "base")
    pairs = [
        {
            "prompt": chat(f"{n}+1?"),
            "chosen": [{"role": "assistant", "content": str(n + 1)}],
            "rejected": [{"role": "assistant", "content": str(n)}],
        }
        for n in range(24)
    ]
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    fields = make(rows="pairs", path=str(path), validation_fraction=0.25).to_dict()
    fields |= {"init": str(tmp_path / "base")}
    fields["train"] |= {"objective": {"kind": "dpo", "beta": 0.5}}
    fields["model"] = {}
    recipe, told = Recipe.from_dict(with_init(fields)), []
    train(recipe, tmp_path / "whole", on_event=told.append)
    first, *_, last = [event for event in told if event["kind"] == "step"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)  # equal to the reference
    assert last["accuracy"] > 0.5
    assert last["loss"] < first["loss"]
    rows = 6 * 4
    assert 2 * rows < last["tokens"] < 3 * rows  # one or two digits, and the end of the answer
    assert {one.name for one in (tmp_path / "whole" / "reference").iterdir()} == {
        "train-corpus.npy",
        "validation-corpus.npy",
    }
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(max((tmp_path / "resumed" / "checkpoints").glob("*6")))
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=6)
    looked_at = [(event["kind"], event["step"]) for event in told if event["kind"] in LOOKS]
    assert looked_at == [("validation", 0), ("samples", 0), ("validation", 6), ("samples", 6)]
    assert _looks(tmp_path / "resumed") == _looks(tmp_path / "whole")
    before, after = [event for event in told if event["kind"] == "validation"]
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert (before["margin"], before["accuracy"]) == pytest.approx((0, 0), abs=1e-5)
    assert after["margin"] == pytest.approx(after["reward_chosen"] - after["reward_rejected"])
    assert_reference_is_checked(recipe, tmp_path / "whole", "train-corpus.npy", "log-probabilities")
