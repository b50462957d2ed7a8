"""Make preference pairs of a model's own mistakes, without a judge.

    python recipes/stdlib_pairs.py runs/stdlib-chat runs/stdlib-pairs [QUESTIONS]

The model answers the questions of recipes/stdlib-chat.yaml greedily. If stdlib_answers.py finds an
answer wrong, or the model does not end it, it is rejected and the known answer is chosen. Half of
the training questions give train.jsonl, the held-out ones validation.jsonl; or up to QUESTIONS of
each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import stdlib_answers

import workhorse
from workhorse.data import read_documents
from workhorse.data.config import ConversationsConfig
from workhorse.data.documents import SplitName
from workhorse.evaluate.answers import Answer, answer_questions, questions_of
from workhorse.files.writing import replacing

REWARDS = {name: getattr(stdlib_answers, name) for name in ("form", "name", "kind", "module")}
SOURCE = ConversationsConfig(path=Path("stdlib"))
LIMITS: dict[SplitName, float | None] = {"train": 0.5, "validation": None}
"""The fraction of each split's questions that are asked; None: all."""


def main(run: str, folder: Path, most: int | None = None) -> None:
    """Write the pairs of both splits, of up to `most` questions each, and print their number."""
    model = workhorse.load(run)
    folder.mkdir(parents=True, exist_ok=True)
    for split, limit in LIMITS.items():
        questions = questions_of(read_documents(SOURCE, split), limit)[:most]
        print(f"{split}: asking {len(questions):,} questions", file=sys.stderr, flush=True)
        answers = answer_questions(model, questions, REWARDS)
        wrong = [json.dumps(pair(one)) for one in answers if one.text.strip() and not one.right]
        with replacing(folder / f"{split}.jsonl") as path:
            path.write_text("".join(f"{line}\n" for line in wrong), "utf-8")
        print(f"{split}: {len(wrong):,} of {len(answers):,} answers are wrong")


def pair(answer: Answer) -> dict[str, Any]:
    """A record of `rows: pairs`."""
    sides = {"chosen": answer.question.known, "rejected": answer.text.strip()}
    messages = {side: [{"role": "assistant", "content": sides[side]}] for side in sides}
    return {"prompt": answer.question.prompt, **messages}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
