"""Records of conversations, and rows of documents with weights."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workhorse.config.base import ConfigError
from workhorse.data import (
    Batches,
    DataConfig,
    Split,
    TokenStream,
    ValidationBatches,
    read_documents,
)
from workhorse.data.config import ConversationsConfig
from workhorse.data.conversations import Example, record_of
from workhorse.errors import WorkhorseError

ASK = {"role": "user", "content": "Why?"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}


def examples(fields: dict[str, Any], rows: Any = "conversations") -> tuple[Example, ...]:
    return record_of(fields, rows, "file:1").examples


def test_the_columns_of_a_conversation() -> None:
    (plain,) = examples({"messages": [ASK, YES], "tools": None})
    assert plain == Example((ASK, YES))
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Yes."}]
    assert examples({"conversations": turns}) == (plain,)
    (with_system,) = examples({"conversations": turns, "system": "Be brief."})
    assert with_system.messages[0] == {"role": "system", "content": "Be brief."}
    (completed,) = examples({"prompt": [ASK], "completion": [YES]})
    assert completed == Example((ASK, YES), n_prompt=1)
    (raw,) = examples({"prompt": "1+1=", "completion": "2"})
    assert raw.strings == ("1+1=", "2")
    (tools,) = examples({"messages": [ASK, YES], "tools": '[{"name": "f"}]'})
    assert tools.tools == [{"name": "f"}]


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{**more, "function": function}]}


def test_nulls_are_kept_only_in_the_data_of_tools(tmp_path: Path) -> None:
    """A Parquet file has the fields of all its records in each, as null."""
    tools = [{"name": "f", "parameters": {"default": None}}]
    call = {**called({"city": None}, id=None), "content": None}
    fields = {"messages": [{**ASK, "tool_calls": None}, call], "tools": tools, "label": None}
    (example,) = examples(fields)
    assert example == Example((ASK, called({"city": None})), tools=tools)
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "calls.parquet"
    records = [fields, {"messages": [called({"city": "Bern"})]}]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), path)
    source = ConversationsConfig(path=path, validation_fraction=0)
    first, _ = read_documents(source, "train")
    assert first.example == Example((ASK, called({})), tools=[{"name": "f", "parameters": {}}])


def test_arguments_as_json_are_the_same_as_an_object() -> None:
    given = [{"messages": [ASK, called(one)]} for one in ({"a": None}, '{"a": null}')]
    first, second = (record_of(fields, "conversations", "a") for fields in given)
    assert first == second
    assert examples({"messages": [ASK, called(" ")]})[0].messages == (ASK, called({}))


def test_a_pair_has_a_common_prompt() -> None:
    chosen, rejected = examples({"chosen": [ASK, YES], "rejected": [ASK, NO]}, "pairs")
    assert (chosen.messages, chosen.n_prompt) == ((ASK, YES), 1)
    assert (rejected.messages, rejected.n_prompt) == ((ASK, NO), 1)
    given = {"prompt": [ASK], "chosen": [YES], "rejected": [NO], "margin": 2}
    assert [one.value for one in examples(given, "pairs")] == [2.0, 2.0]
    strings = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert [one.strings for one in examples(strings, "pairs")] == [("a", "b"), ("a", "c")]


MORE = [{"role": "system", "content": "S"}, ASK, YES, {"role": "user", "content": "Sure?"}]
WHOLE = {"chosen": [ASK, YES], "rejected": [ASK, NO]}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"chosen": [*MORE, YES], "rejected": [*MORE, NO]}, MORE),
        ({"chosen": [ASK, YES, ASK, NO], "rejected": [ASK, YES]}, [ASK]),
        ({"chosen": [{"from": "human", "value": "Why?"}, YES], "rejected": [ASK, NO]}, [ASK]),
        ({**WHOLE, "prompt": [ASK]}, [ASK]),
        ({**WHOLE, "prompt": []}, [ASK]),
        ({**WHOLE, "prompt": "Why?"}, [ASK]),
        ({**WHOLE, "prompt": MORE[:2]}, MORE[:2]),
        ({**WHOLE, "prompt": MORE[:1]}, MORE[:2]),
        ({"prompt": MORE[:2], "chosen": [*MORE, YES], "rejected": [*MORE, NO]}, MORE),
        ({**WHOLE, "prompt": MORE}, MORE),  # the answers go on after the prompt
        ({"prompt": [ASK], "chosen": YES, "rejected": NO, "system": "S"}, MORE[:2]),
        (
            {"conversations": [{"from": "human", "value": "Why?"}], "chosen": YES, "rejected": NO},
            [ASK],
        ),
    ],
)
def test_messages_of_a_pair_are_divided_into_prompt_and_answers(
    fields: dict[str, Any], prompt: list[Any]
) -> None:
    for example, name in zip(examples(fields, "pairs"), ("chosen", "rejected"), strict=True):
        assert list(example.messages[: example.n_prompt]) == prompt
        assert (
            example.messages[-1] == fields[name]
            if isinstance(fields[name], dict)
            else fields[name][-1]
        )


START = "\n\nHuman: What is 2+2?\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (START + " four", START + " five", START),
        (START + " 4", START + " five", START),
        (START + " It is 4.", START + " It is five.", START + " It is"),
        (START + " It", START + " Item", START),
        (START + " yes", START + " yes, it is", START),
        (START + "(a)", START + "(b)", START + "("),
        ("the cat sat", "the dog sat", "the"),
        ("b", "c", ""),
    ],
)
def test_strings_of_a_pair_are_divided_before_a_word(
    chosen: str, rejected: str, prompt: str
) -> None:
    for more in ({}, {"prompt": prompt}):
        pair = examples({"chosen": chosen, "rejected": rejected, **more}, "pairs")
        strings = [(prompt, one.removeprefix(prompt)) for one in (chosen, rejected)]
        assert [one.strings for one in pair] == strings
    trl = pytest.importorskip("trl.data_utils")
    theirs = trl.extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"]
    assert theirs.startswith(prompt)
    assert theirs == prompt or theirs[len(prompt) :].strip().isalnum()  # a part of a word


def test_a_label_is_the_value() -> None:
    for label in (True, False):
        (example,) = examples({"prompt": "a", "completion": "b", "label": label}, "labels")
        assert example.value == float(label)


def test_records_with_the_same_prompt_have_the_same_split() -> None:
    first = record_of({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, "pairs", "a")
    second = record_of({"prompt": [ASK], "chosen": [NO], "rejected": [YES]}, "pairs", "b")
    assert first.identity == second.identity


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ("conversations", {"text": "x"}, "no field 'messages'"),
        ("conversations", {"chosen": [ASK, YES], "rejected": [ASK, NO]}, "set rows: pairs"),
        ("conversations", {"messages": "x"}, "messages='x' is not a list of messages"),
        ("conversations", {"messages": []}, "messages=[] is not a list of messages"),
        ("conversations", {"messages": [3]}, "message 0 is 3, not an object"),
        ("conversations", {"messages": [{"content": "x"}]}, "message 0 has no role"),
        ("conversations", {"conversations": [{"from": "bob", "value": "x"}]}, "is from 'bob'"),
        ("conversations", {"messages": [ASK, YES], "tools": "["}, "tools='[' is not JSON"),
        ("conversations", {"prompt": "a", "completion": [YES]}, "use one form for both"),
        ("conversations", {"prompt": "a", "completion": ""}, "the answer is empty"),
        ("pairs", {"chosen": [YES]}, "no field 'rejected'; rename a field, or add it (known: ch"),
        ("pairs", {"messages": [ASK, YES], "tools": "[]"}, "no field 'chosen'; set rows: conversa"),
        ("pairs", {"prompt": "a", "completion": "b", "label": True}, "'chosen'; set rows: labels"),
        ("labels", {"chosen": [ASK, YES], "rejected": [ASK, NO]}, "'label'; set rows: pairs"),
        ("labels", {"messages": [ASK, YES], "label": True}, "'prompt'; rename a field, or add it"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ("pairs", {"chosen": 5, "rejected": 6}, "chosen=5 is not a list of messages"),
        ("pairs", {"chosen": True, "rejected": False}, "chosen=True is not a list of messages"),
        ("pairs", {"chosen": {"role": 3}, "rejected": "a"}, "message 0 has no role"),
        ("pairs", {"chosen": "a", "rejected": [NO]}, "a string and a list; use one form for both"),
        ("pairs", {"prompt": "a", "chosen": [YES], "rejected": [NO]}, "use one form for both"),
        ("pairs", {"prompt": [ASK], "chosen": "a", "rejected": "b"}, "use one form for both"),
        ("conversations", {"messages": [ASK, YES], "tools": "[" * 10**5}, "… is not JSON"),
        ("conversations", {"messages": [ASK, called("{")]}, "arguments='{' is not JSON"),
        ("conversations", {"messages": [ASK, called("3")]}, "='3' is not a JSON object; correct"),
        (
            "pairs",
            {"chosen": [{**ASK, "content": "x"}, YES], "rejected": [ASK, NO]},
            "different messages have the role user; give both answers the same prompt",
        ),
        (
            "pairs",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")},
            "margin=nan is not a number",
        ),
        (
            "pairs",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400},
            "0… is not a number from -1e+15 to 1e+15",
        ),
        ("labels", {"prompt": "a", "completion": "b", "label": 3}, "label=3 is not true or false"),
    ],
)
def test_wrong_records(rows: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkhorseError, match=re.escape(message)) as raised:
        record_of(fields, rows, "file:1")
    assert str(raised.value).startswith("file:1: ")
    assert "\n" not in str(raised.value)


def stream(
    weights: Sequence[Sequence[float]], group: int = 1, values: Sequence[float] | None = None
) -> TokenStream:
    """Make a stream in which each token is its position; `weights` are given per document."""
    ends = np.cumsum([len(one) for one in weights])
    flat = np.concatenate([np.array(one, np.float32) for one in weights])
    return TokenStream(
        "chat",
        np.array_split(np.arange(ends[-1]), 2),
        ends,
        weights=np.array_split(flat, 2),
        values=None if values is None else np.array(values, np.float32),
        group=group,
    )


def split(one: TokenStream) -> Split:
    return Split("train", (one,), (1.0,))


WEIGHTS = [[0, 0, 1, 1], [0, 1, 0.5], [0, 0, 0], [0] * 6 + [1, 1], [0, 1, 1]]
"""Five documents: the third teaches nothing, the fourth has 7 predictions."""


def rows_of(**options: Any) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Tokens, targets and weights of each row of an epoch, by the row's first token."""
    batches = Batches(split(stream(WEIGHTS)), seq_len=5, batch_size=1, **options)
    found = {}
    for step in range(batches.rows_per_epoch["chat"]):
        batch = batches[step]
        assert batch.weights is not None
        row = batch.tokens[0].tolist(), batch.targets[0].tolist(), batch.weights[0].tolist()
        found[row[0][0]] = row
    return found


def test_one_document_per_row() -> None:
    rows = rows_of(packing="padded")
    assert rows == {
        0: ([0, 1, 2, 0, 0], [-100, 2, 3, -100, -100], [0, 1, 1, 0, 0]),
        4: ([4, 5, 0, 0, 0], [5, 6, -100, -100, -100], [1, 0.5, 0, 0, 0]),
        18: ([18, 19, 0, 0, 0], [19, 20, -100, -100, -100], [1, 1, 0, 0, 0]),
    }


def test_a_long_document_keeps_its_end() -> None:
    rows = rows_of(packing="padded", too_long="keep_end")
    assert rows[12] == ([12, 13, 14, 15, 16], [-100, -100, -100, 16, 17], [0, 0, 0, 1, 1])
    assert 10 not in rows_of(packing="padded", too_long="keep_start")  # nothing of it is learned


def test_packed_rows_hold_the_same_learned_tokens() -> None:
    def learned(rows: dict[int, Any]) -> set[tuple[int, float]]:
        return {
            (target, weight)
            for _, targets, weights in rows.values()
            for target, weight in zip(targets, weights, strict=True)
            if target >= 0
        }

    assert learned(rows_of(packing="documents")) == learned(rows_of(packing="padded"))
    assert len(rows_of(packing="documents")) == 2


def test_documents_that_are_not_used_are_counted() -> None:
    (line,) = Batches(split(stream(WEIGHTS)), seq_len=5, batch_size=1, packing="documents").left_out
    assert "1 longer than 5 predictions and 1 without a token to learn of 5 documents" in line
    with pytest.raises(WorkhorseError, match="all 2 documents"):
        Batches(split(stream([[0, 1, 1, 1]] * 2)), seq_len=2, batch_size=1, packing="padded")


def test_a_pair_stays_together() -> None:
    """Also if one of the two is too long: then both are left out."""
    weights = [[0, 1, 1], [0, 1], [0, 1, 1, 1, 1, 1, 1], [0, 1], [0, 1], [0, 1, 1, 1]]
    pairs = split(stream(weights, group=2, values=[0.5, 0.5, 1, 1, 2, 2]))
    batches = Batches(pairs, seq_len=4, batch_size=4, packing="padded", seed=3)
    assert batches.rows_per_epoch == {"chat": 4}
    for step in range(4):
        batch = batches[step]
        firsts = batch.tokens[:, 0].tolist()
        assert {tuple(firsts[:2]), tuple(firsts[2:])} == {(0, 3), (14, 16)}
        assert batch.group is not None
        assert batch.values is not None
        assert batch.group.tolist() == [0, 0, 1, 1]
        assert sorted(batch.values.tolist()) == [0.5, 0.5, 2, 2]
    (held_out,) = ValidationBatches(pairs, seq_len=4, batch_size=2, packing="padded", max_rows=3)
    assert held_out.tokens[:, 0].tolist() == [0, 3]
    with pytest.raises(WorkhorseError, match="batch_size=3 splits groups of 2 rows"):
        Batches(pairs, seq_len=4, batch_size=3, packing="padded")


def test_packing_follows_the_kind_of_rows() -> None:
    chat = {"kind": "conversations", "path": "chat.jsonl"}
    assert DataConfig.from_dict({"corpus": chat}).packing == "documents"
    assert DataConfig.from_dict({"corpus": {**chat, "rows": "pairs"}}).packing == "padded"
    mixture = {"kind": "mixture", "sources": {"chat": chat, "code": "stdlib"}}
    assert DataConfig.from_dict({"corpus": mixture}).packing == "documents"
    assert DataConfig.from_dict({"corpus": "stdlib"}).packing == "windows"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": "windows"}, "packing=windows mixes conversations"),
        ({"packing": "padded", "too_long": "split"}, "padded rows cannot be split"),
        ({"rows": "pairs", "packing": "documents"}, "puts several answers into a row"),
    ],
)
def test_packing_that_does_not_fit_is_refused(fields: dict[str, str], message: str) -> None:
    corpus = {"kind": "conversations", "path": "x.jsonl", "rows": fields.get("rows", "labels")}
    rest = {name: value for name, value in fields.items() if name != "rows"}
    with pytest.raises(ConfigError, match=re.escape(message)):
        DataConfig.from_dict({"corpus": corpus, **rest})
    with pytest.raises(ConfigError, match="overlap=drop has no effect without validation"):
        DataConfig.from_dict({"corpus": {**corpus, "overlap": "drop"}})
    with pytest.raises(ConfigError, match="learn=last has no effect on rows=pairs"):
        DataConfig.from_dict({"corpus": {**corpus, "rows": "pairs", "learn": "last"}})
    with pytest.raises(ConfigError, match="too_long=drop has no effect with packing=windows"):
        DataConfig.from_dict({"corpus": "stdlib", "too_long": "drop"})
