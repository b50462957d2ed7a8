"""Task files that would crash the harness's parsers fail a check before the harness reads them."""

from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.evaluate.tasks import check_file

TASK = "task: x\ndataset_path: json\ndataset_kwargs: {data_files: {test: QUESTIONS}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a task; write a mapping"),
        ("[1]", "is not a task; write a mapping"),
        ("task:", "is not a task; write a mapping"),
        ("task: x", "has no dataset_path; set it to"),
        ("[" * 3000, "nested deeper than 64"),
        ("task: " + "9" * 5000, "digits"),
    ],
)
def test_what_is_no_task(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(WorkhorseError, match=rf"t\.yaml.*{message}"):
        check_file(tmp_path / "t.yaml")


@pytest.mark.parametrize("text", ["null", '{"a": 1}\n3', "text"])
def test_questions_that_are_no_objects(text: str, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(text)
    (tmp_path / "t.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
    with pytest.raises(WorkhorseError, match=r"q\.jsonl:\d is not a JSON object"):
        check_file(tmp_path / "t.yaml")


@pytest.mark.parametrize(
    "text", [TASK, "group: g\ntask: [a]", "include: other.yaml\ntask: y", TASK + "f: !function a.b"]
)
def test_tasks_pass(text: str, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"a": 1}\n\n {"a": 2}\n')
    (tmp_path / "t.yaml").write_text(text.replace("QUESTIONS", str(questions)))
    check_file(tmp_path / "t.yaml")
