"""Tasks of the lm-evaluation-harness in local files, with random sentences."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

NOUNS = ["cat", "dog", "house", "tree", "moon", "river"]
WORDS = ["the", "a", "old", "red", "sees", "finds", "runs", "and", "to", "under", *NOUNS]


def sentence(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def write_tasks(folder: Path, n: int = 50) -> Path:
    """Write the tasks `choices`, `letters`, `continue` and `prose`; `n` documents or fewer each."""
    draw = random.Random(0)
    choices = [
        {
            # Some are longer than the context, some are empty.
            "question": "" if i % 10 == 9 else sentence(draw, 2, 60),
            "options": [sentence(draw, 1, 5) for _ in range(3)],
            "answer": draw.randrange(3),
        }
        for i in range(n)
    ]
    letters = [
        {**row, "question": f"{row['question']} ?", "options": ["a", "b"]} for row in choices
    ]
    for row in letters:
        row["answer"] %= 2
    questions = [
        {"question": sentence(draw, 1, 60), "answer": draw.choice("aefhjn")} for _ in range(n)
    ]
    prose = [{"text": sentence(draw, 1, 150)} for _ in range(n // 4)]
    multiple = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    write_task(folder, "choices", choices, **multiple)
    write_task(folder, "letters", letters, **multiple)
    write_task(
        folder,
        "continue",
        questions,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["dog", "\n"], "max_gen_toks": 12, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
        filter_list=[
            {
                "name": "letter",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-z])"},
                    {"function": "take_first"},
                ],
            },
        ],
    )
    write_task(
        folder,
        "prose",
        prose,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )
    return folder


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
