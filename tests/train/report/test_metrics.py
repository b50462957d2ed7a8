import errno
import json
import math
import os
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.train.report.metrics import Event, MetricsFile, read_metrics

SPEED = {"tokens": 4, "seconds": 1.0, "tokens_per_second": 4.0}


def write_some(path: Path) -> None:
    metrics = MetricsFile(path)
    metrics.open()
    for step in (1, 2, 3):
        metrics.write({"kind": "step", "step": step, "loss": step / 3, **SPEED})
        metrics.write({"kind": "validation", "step": step, "loss": 0.1})
    metrics.close()


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_some(tmp_path / "metrics.jsonl")
    written = {"kind": "step", "step": 1, "loss": 1 / 3, **SPEED}
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == written


def test_a_resume_drops_what_will_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_some(path)
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')  # the process died here
    before = path.read_bytes()
    again = MetricsFile(path, step=2)
    assert path.read_bytes() == before  # a resume may still fail its checks
    again.open()
    again.write({"kind": "step", "step": 3, "loss": 1.0, **SPEED})
    again.close()
    assert [event["step"] for event in read_metrics(path)] == [1, 1, 2, 2, 3]


def test_looks_before_the_first_step_are_repeated_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kinds = ("start", "validation", "samples")
    more = '"step": 0, "parameters": 9, "steps": 4'
    path.write_text("".join(f'{{"kind": "{kind}", {more}}}\n' for kind in kinds))
    metrics = MetricsFile(path)
    metrics.open()
    metrics.close()
    assert [event["kind"] for event in read_metrics(path)] == ["start"]


def test_a_fresh_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    write_some(tmp_path / "metrics.jsonl")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.open()
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_infinite_numbers_are_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.open()
    skipped = {"kind": "skipped_step", "step": 1, "loss": math.nan, "grad_norm": math.inf}
    metrics.write({**skipped, "expert_load_entropy": [1.0, math.nan]})
    metrics.close()
    (event,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (event["loss"], event["grad_norm"]) == (None, None)
    assert event["expert_load_entropy"] == [1.0, None]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "x"}', "[" * 5000, "9" * 5000, "\0"])
def test_a_file_that_no_run_wrote(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n')
    with pytest.raises(
        WorkhorseError, match=r"metrics\.jsonl:2 .*; it is damaged; remove the line"
    ):
        MetricsFile(path, step=1)
    assert path.read_text().endswith(f"{line}\n")  # the file is unchanged


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ({"kind": "step", "tokens": 4, "seconds": 1.0}, "tokens_per_second"),
        ({"kind": "step", **SPEED, "seconds": None}, "seconds"),
        ({"kind": "step", **SPEED, "tokens": 10**400}, "tokens"),
        ({"kind": "step", **SPEED, "loss": "low"}, "loss"),
        ({"kind": "step", **SPEED, "pass_seconds": [1.0, "x"]}, "pass_seconds"),
        ({"kind": "validation", "reward": [{}]}, "reward"),
        ({"kind": "start", "steps": 9}, "parameters"),
        ({"kind": "start", "steps": 9, "parameters": 9, "time": "now"}, "time"),
        ({"kind": "samples", "samples": ["x"]}, "samples"),
        ({"kind": "rollouts", "rollouts": [{"prompt": "a", "text": None}]}, "rollouts"),
        ({"kind": "end", "time": 1.0}, "reason"),
        ({"kind": "end", "reason": "finished", "peak_memory": 4}, "peak_memory"),
        ({"kind": "end", "reason": "finished", "peak_memory": [None]}, "peak_memory"),
        ({"kind": "back"}, "message"),
    ],
)
def test_an_event_that_no_report_can_show(tmp_path: Path, event: Event, key: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "checkpoint", "step": 1}}\n{json.dumps({**event, "step": 2})}\n')
    message = f"metrics.jsonl:2 has a {event['kind']} event whose {key} is missing or has"
    with pytest.raises(WorkhorseError, match=message):
        read_metrics(path)


def test_a_change_that_no_checkpoint_has_is_found_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.open()
    for step in (2, 4):
        metrics.write({"kind": "change", "step": step, "setting": "train.steps"})
    metrics.close()
    again = MetricsFile(path, step=4)
    again.open()
    again.close()
    assert [event["step"] for event in read_metrics(path)] == [2]


def test_a_disk_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.open()

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(WorkhorseError, match=r"metrics\.jsonl: Input/output error; check the disk"):
        metrics.sync()
    metrics.close()
