"""Verifiable tasks: their prompts and answers, and scores of completions."""

from typing import get_args

import pytest

from workhorse.data import DataConfig, read_documents
from workhorse.data.tasks import TASKS, TaskName, examples, reaches, similarity


def test_every_task_has_different_prompts_that_its_answer_solves() -> None:
    assert set(TASKS) == set(get_args(TaskName))
    for task in TASKS:
        made = dict(examples(task, 50, 3, seed=1))
        assert len(made) == 50
        assert made == dict(examples(task, 50, 3, seed=1))
        assert made != dict(examples(task, 50, 3, seed=2))
        for prompt, answer in made.items():
            if task == "countdown":
                assert reaches(prompt, answer) == 1
            elif task == "addition":
                assert eval(prompt.removesuffix("=")) == int(answer)
            else:
                word = prompt.split()[1].removesuffix("=")
                assert sorted(answer.replace("-", "")) == sorted(word)


def test_a_task_with_few_prompts_ends() -> None:
    assert len(list(examples("copy", 1000, 1, seed=0))) == 26


@pytest.mark.parametrize(
    ("expression", "score"),
    [
        ("(3+4)*5", 1),
        ("5*(4+3)", 1),
        ("5*4+3", 0.1),
        ("3+4*5", 0.1),
        ("3-4-5", 0.1),
        ("(3+4)", 0),
        ("3+4+5+5", 0),
        ("(3+4)*5)", 0),
        ("(3+4*5", 0),
        ("3 4 5", 0),
        ("4/(3-3)*5", 0),
        ("-" * 3000 + "3+4+5", 0),
        ("+" * 10**6 + "3+4+5", 0),
        ("(" * 10**5 + "3+4+5" + ")" * 10**5, 0),
        ("", 0),
        ("__import__('os')", 0),
        ("3**4+5", 0),
        ("35 # 3 4 5", 0),
        ("-3+4+5", 0),
    ],
)
def test_an_expression_is_checked_without_evaluating_it_as_python(
    expression: str, score: float
) -> None:
    assert reaches("3 4 5 make 35=", expression) == score
    assert reaches("3 4 5 make thirty=", expression) == 0


def test_similarity_is_one_only_for_the_answer() -> None:
    assert similarity("abc", "abc") == 1
    assert similarity("abd", "abc") == pytest.approx(2 / 3)
    assert similarity("abcc", "abc") == 0.75
    assert similarity("", "abc") == 0
    assert similarity("", "") == 1


def test_a_task_is_a_source_with_both_splits() -> None:
    config = DataConfig.from_dict({"corpus": {"kind": "task", "task": "sort", "count": 100}})
    assert config.packing == "documents"
    (source,) = config.sources.values()
    splits = {
        split: {document.name for document in read_documents(source, split)}
        for split in ("train", "validation")
    }
    assert len(splits["train"]) + len(splits["validation"]) == 100
    assert not splits["train"] & splits["validation"]
