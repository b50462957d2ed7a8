"""Answers of a model to questions with known answers, scored by rewards.

A question is a conversation before its last message, or the prompt of a task. Rewards come from
`workhorse.train.rewards`, so the function that measures a model can also train it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from workhorse.data import Document
from workhorse.data.conversations import Example
from workhorse.data.documents import hash_of
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig
from workhorse.generate.conversation import TextMessage
from workhorse.train.rewards import Reward

if TYPE_CHECKING:
    from workhorse.model.model import Model


@dataclass(frozen=True)
class Question:
    """A question with its known answer."""

    prompt: str | list[TextMessage]
    """Messages, or a string that is encoded without a template."""
    text: str
    """The string, or the content of the last message."""
    known: str
    """The known answer."""
    name: str = field(default="", compare=False)
    """Name of the document, such as its file and line."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    question: Question
    text: str
    """The answer as a string."""
    ended: bool
    """True if the model ended the answer, False if it reached the maximum number of tokens."""
    rewards: Mapping[str, float]
    """The rewards by name."""

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
    for document in documents:
        example = document.example
        if example is None or example.value is not None or document.error:
            continue  # not an answer of a pair, or a label
        found.append(_question_of(example, document.name))
    if limit is not None:
        count = int(limit if limit >= 1 else limit * len(found))
        found = sorted(found, key=lambda question: hash_of(question.text))[: max(count, 0)]
    if not found:
        raise WorkhorseError(
            "no question with a known answer is left; give other --data or a larger --limit"
        )
    return found


def _question_of(example: Example, where: str) -> Question:
    if example.strings is not None:
        prompt, known = example.strings
        return Question(prompt, prompt, known, where)
    *messages, last = (
        {"role": message["role"], "content": message.get("content")} for message in example.messages
    )
    strings = all(isinstance(message["content"], str) for message in (*messages, last))
    answered = messages and last["role"] == "assistant"
    if not strings or not answered or example.tools is not None:
        raise WorkhorseError(
            f"{where} has tools, content that is not a string, or no answer; remove it"
        )
    return Question(messages, messages[-1]["content"], last["content"], where)


def answer_questions(
    model: "Model",
    questions: Sequence[Question],
    rewards: Mapping[str, Reward],
    *,
    batch_size: int = 32,
) -> list[Answer]:
    """Generate a greedy answer to each question, and score it with rewards by name.

    A model that was trained to chat gets messages in its chat template, other models as a plain
    dialogue, as in `Model.chat`. Up to `batch_size` answers are generated together.

    Raises:
        WorkhorseError: a question is longer than the model's context.
    """
    form, context = model.chat_format(), model.config.max_seq_len
    prompts = [
        model.encode(one) if isinstance(one, str) else form.encode(one)
        for one in (question.prompt for question in questions)
    ]
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt) > context:
            raise WorkhorseError(
                f"{model.name}: the question in {question.name} has {len(prompt)} tokens and the "
                f"context is {context}; remove it"
            )
    completions = model.generate_batch(
        prompts,
        GenerationConfig(temperature=0, stop=form.stop, stop_tokens=form.stop_tokens),
        batch_size=batch_size,
    )
    asked = [question.text for question in questions]
    texts = [completion.text for completion in completions]
    known = [question.known for question in questions]
    scores = {name: reward(asked, texts, known) for name, reward in rewards.items()}
    return [
        Answer(
            question,
            completion.text,
            completion.finish_reason != "length",
            {name: values[row] for name, values in scores.items()},
        )
        for row, (question, completion) in enumerate(zip(questions, completions, strict=True))
    ]


def fractions(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the fractions of answers that ended and that are right, and the mean rewards."""
    rows = [{"ended": answer.ended, **answer.rewards, "right": answer.right} for answer in answers]
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
