"""Questions of conversations and tasks, and the scores of a model's answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from workhorse import load
from workhorse.data import Document, read_documents
from workhorse.data.config import RowKind, TaskConfig
from workhorse.data.conversations import record_of
from workhorse.errors import WorkhorseError
from workhorse.evaluate.answers import answer_questions, fractions, questions_of
from workhorse.tokenizers import Tokenizer


def documents(*records: dict[str, Any], rows: RowKind = "conversations") -> list[Document]:
    return [
        Document(f"line {at}", "", example=example)
        for at, fields in enumerate(records)
        for example in record_of(fields, rows, f"line {at}").examples
    ]


def turns(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    found = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in found]}


def test_the_last_message_is_the_known_answer() -> None:
    (question,) = questions_of(documents(turns("a?", "b", "c?", "d")))
    assert question.prompt == turns("a?", "b", "c?")["messages"]
    assert (question.text, question.known) == ("c?", "d")
    (question,) = questions_of(documents({"prompt": "2+2=", "completion": "4"}))
    assert (question.prompt, question.text, question.known) == ("2+2=", "2+2=", "4")


def test_a_limit_does_not_depend_on_the_order() -> None:
    records = [turns(f"{n}?", "yes") for n in range(20)]
    chosen = questions_of(documents(*records), 5)
    assert chosen == questions_of(documents(*reversed(records)), 5)
    assert [one.text for one in chosen] != [f"{n}?" for n in range(5)]  # from all parts
    assert questions_of(documents(*records), 0.25) == chosen
    assert [one.text for one in questions_of(documents(*records))] == [f"{n}?" for n in range(20)]
    task = TaskConfig(task="reverse", count=50)
    held_out = questions_of(read_documents(task, "validation"))
    assert all(one.text not in {each.text for each in chosen} for one in held_out)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            [Document("a", "text")],
            "no question with a known answer is left; give other --data or a larger --limit",
        ),
        (
            documents({"prompt": "a", "chosen": "b", "rejected": "c"}, rows="pairs"),
            "no question with",
        ),
        (
            documents({"prompt": "a", "completion": "b", "label": 1}, rows="labels"),
            "no question with",
        ),
        (documents({**turns("a?", "b"), "tools": [{"name": "f"}]}), "line 0 has tools"),
        (documents(turns([{"type": "text", "text": "a?"}], "b")), "content that is not a string"),
        (documents(turns("a?", "b", "c?")), "or no answer"),
        (documents({"messages": turns("", "a")["messages"][1:]}), "or no answer"),
    ],
)
def test_data_without_questions(found: list[Document], message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        questions_of(found)


@pytest.mark.parametrize("limit", [0, -1, 0.2])
def test_a_limit_that_leaves_nothing(limit: float) -> None:
    with pytest.raises(WorkhorseError, match="no question with a known answer is left"):
        questions_of(documents(turns("a?", "b")), limit)


@pytest.mark.parametrize("chats", [False, True], ids=["base", "tuned"])
def test_answers_are_those_of_a_chat(run_folder, chats: bool) -> None:
    """Greedy answers, generated together, equal the replies of separate conversations."""
    model = load(run_folder)
    if chats:
        text = model.text
        template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
        tokenizer = Tokenizer(text.definition, text.roles, template)
        model = replace(model, tokenizer=tokenizer, trained_to_chat=True)
        # So that some replies end by themselves.
        weights = model.reference.get_parameter("head.proj.weight")
        with torch.no_grad():
            weights[tokenizer.special_tokens["<|end|>"]] *= 2
    questions = questions_of(documents(*(turns(f"{n}?", "b" * n) for n in range(1, 4))))
    rewards = {"length": lambda _, texts, known: [float(len(text)) for text in texts]}
    answers = answer_questions(model, questions, rewards)
    assert {answer.ended for answer in answers} == {False, chats}
    for question, answer in zip(questions, answers, strict=True):
        deltas = [*model.chat(temperature=0).reply(question.text)]
        assert answer.text == "".join(delta.text for delta in deltas)
        assert answer.ended == (deltas[-1].finish_reason != "length")
        assert answer.rewards == {"length": len(answer.text)}
        assert answer.question == question


def test_a_question_longer_than_the_context(run_folder) -> None:
    questions = questions_of(documents(turns("a?", "b"), turns("a" * 99, "b")))
    with pytest.raises(WorkhorseError, match=r"run.*: the question in line 1 has \d+ tokens and"):
        answer_questions(load(run_folder), questions, {})


def test_an_answer_is_right_if_it_ended_and_all_rewards_are_1(run_folder) -> None:
    questions = questions_of(documents(turns("a?", "b")))
    rewards = {"good": lambda *_: [1.0], "bad": lambda *_: [0.5]}
    (answer,) = answer_questions(load(run_folder), questions, rewards)
    good = replace(answer, ended=True, rewards={"good": 1.0})
    assert good.right
    assert not replace(good, ended=False).right
    assert not replace(answer, ended=True).right
    found = fractions([good, replace(good, rewards={"good": 0.5}), replace(good, ended=False)])
    assert found == pytest.approx({"ended": 2 / 3, "good": 2.5 / 3, "right": 1 / 3})
