"""Answers of a model to questions with known answers, scored by rewards.

A question is a conversation before its last message, or the prompt of a task. Rewards come from
`workhorse.train.rewards`, so the function that measures a model can also train it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workhorse.data import Document
from workhorse.data.documents import hash_of
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig
from workhorse.generate.conversation import TextMessage
from workhorse.model.model import Model
from workhorse.train.rewards import Reward


@dataclass(frozen=True)
class Question:
    """A question with its known answer."""

    prompt: str | list[TextMessage]
    """Messages, or a string that is encoded without a template."""
    text: str
    """The string, or the content of the last message."""
    known: str
    """The known answer."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    question: Question
    text: str
    ended: bool
    """True if the model ended the answer, False if it reached the maximum number of tokens."""
    rewards: Mapping[str, float]

    @property
    def right(self) -> bool:
        """True if the model ended the answer and all rewards are at least 1."""
        return self.ended and min(self.rewards.values()) >= 1


def questions_of(documents: Iterable[Document], limit: float | None = None) -> list[Question]:
    """Return the questions of conversations and tasks.

    Args:
        documents: the data; see `read_documents`. Only conversations and tasks have questions.
        limit: the maximum number of questions; below 1: the fraction to ask. They are chosen by a
            hash, so they are the same on every machine. None: all, in order.

    Raises:
        WorkhorseError: there are no questions, or one has tools or content that is not a string.
    """
    found: list[Question] = []
    for example, where in ((one.example, one.name) for one in documents):
        if example is None or example.value is not None:
            continue
        if example.strings is not None:
            found.append(Question(example.strings[0], *example.strings))
            continue
        *prompt, last = (
            {"role": one["role"], "content": one.get("content")} for one in example.messages
        )
        strings = all(isinstance(one["content"], str) for one in (*prompt, last))
        answered = prompt and last["role"] == "assistant"
        if not strings or not answered or example.tools is not None:
            raise WorkhorseError(
                f"{where} has tools, content that is not a string, or no answer; remove it"
            )
        found.append(Question(prompt, prompt[-1]["content"], last["content"]))
    if limit is not None:
        count = int(limit if limit >= 1 else limit * len(found))
        found = sorted(found, key=lambda question: hash_of(question.text))[: max(count, 0)]
    if not found:
        raise WorkhorseError(
            "no question with a known answer is left; give other --data or a larger --limit"
        )
    return found


def answer_questions(
    model: Model,
    questions: Sequence[Question],
    rewards: Mapping[str, Reward],
    *,
    batch_size: int = 32,
) -> list[Answer]:
    """Generate a greedy answer to each question, and score it with rewards by name.

    A model that was trained to chat gets messages in its chat template, other models as a plain
    dialogue, as in `Model.chat`. Up to `batch_size` answers are generated together.
    """
    form = model.chat_format()
    completions = model.generate_batch(
        [
            model.encode(one.prompt) if isinstance(one.prompt, str) else form.encode(one.prompt)
            for one in questions
        ],
        GenerationConfig(temperature=0, stop=form.stop, stop_tokens=form.stop_tokens),
        batch_size=batch_size,
    )
    texts = [one.text for one in completions]
    columns = [one.text for one in questions], texts, [one.known for one in questions]
    scores = {name: reward(*columns) for name, reward in rewards.items()}
    rows = zip(questions, completions, zip(*scores.values(), strict=True), strict=True)
    return [
        Answer(
            question, one.text, one.finish_reason != "length", dict(zip(scores, row, strict=True))
        )
        for question, one, row in rows
    ]


def fractions(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the fractions of answers that ended and that are right, and the mean rewards."""
    rows = [{"ended": one.ended, **one.rewards, "right": one.right} for one in answers]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
