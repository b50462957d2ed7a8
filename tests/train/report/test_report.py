import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runs import weights
from tests.train.test_balance import MIXED, recipe_of
from workhorse.checkpoints import RunDirectory
from workhorse.train import StopSignals, read_metrics, train
from workhorse.train.report.metrics import Event, scalars
from workhorse.train.report.page import (
    duration,
    environment,
    figures,
    goodput,
    memory,
    reflowed,
    slowest,
    validation_series,
    write_report,
)


def test_a_report_shows_the_run_and_needs_no_network(make_recipe, tmp_path):
    samples = {"every": 6, "prompts": ["<1> & "], "max_new_tokens": 4}
    result = train(make_recipe(samples=samples, eval_every=4), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"{result.validation_loss:.4f}" in page
    assert f"{result.bits_per_byte:.4f}" in page
    assert "12 of 12" in page
    assert page.count("<svg") == 5  # loss, bits per byte, learning rate, gradient norm, speed
    assert "&lt;1&gt; &amp; " in page  # samples are escaped
    assert "d_model" in page
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)


def test_validations_on_a_part_stand_apart_from_those_on_all() -> None:
    part = [{"step": n, "loss": 5.0 - n, "whole": False} for n in (1, 2)]
    whole = {"step": 3, "loss": 2.5, "whole": True}
    some, all_of_it = validation_series([*part, whole], "loss")
    assert (some.name, list(some.points)) == ("validation on a subset", [(1, 4.0), (2, 3.0)])
    assert (all_of_it.name, list(all_of_it.points)) == ("whole split", [(3, 2.5)])
    assert some.marked
    assert all_of_it.marked
    (only,) = validation_series([whole, {"step": 4, "loss": 2.0}], "loss")
    assert (only.name, len(only.points)) == ("validation", 2)
    start = {"parameters": 1, "steps": 9}
    named = figures({"start": [start], "validation": [{**part[0], "bits_per_byte": None}]})
    assert ("validation loss on a subset, nats per token", "4.0000") in named


def test_a_report_says_what_makes_its_curves_suspect(make_recipe, tmp_path):
    train(make_recipe(), tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    lines = run.metrics_file.read_text("utf-8").splitlines()
    skipped = '{"kind": "skipped_step", "step": 7, "loss": null, "grad_norm": null}'
    run.metrics_file.write_text("\n".join([*lines[:-1], skipped, ""]), "utf-8")
    write_report(run)
    page = run.report_file.read_text("utf-8")
    assert "1 steps were skipped, as loss or gradient was not finite: 7" in page
    assert "the run has not finished" in page


@pytest.mark.parametrize("emptied", [Path.unlink, lambda file: os.truncate(file, 0)])
def test_a_run_whose_metrics_are_removed_meanwhile_ends_as_it_should(
    make_recipe, tmp_path: Path, emptied: Callable[[Path], None]
) -> None:
    def stop_at_six(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            emptied(tmp_path / "run/metrics.jsonl")
            signal.raise_signal(signal.SIGTERM)

    result = train(make_recipe(), tmp_path / "run", on_event=stop_at_six, signals=StopSignals())
    assert (result.stopped_by, result.step) == ("SIGTERM", 6)
    assert result.parameters == sum(
        weight.numel() for weight in weights(tmp_path / "run", 6).values()
    )
    page = (tmp_path / "run/report.html").read_text("utf-8")
    assert "metrics.jsonl has no start event" in page
    assert "d_model" in page
    assert train(make_recipe(), tmp_path / "run", resume=True).step == 12
    assert "12 of 12" in (tmp_path / "run/report.html").read_text("utf-8")


def test_a_report_shows_how_the_experts_are_used(make_recipe, tmp_path):
    recipe = recipe_of(make_recipe, MIXED, balance_loss=0.01, objective={"z_loss": 1e-4})
    train(recipe, tmp_path / "run")
    events = read_metrics(tmp_path / "run/metrics.jsonl")
    start = next(event for event in events if event["kind"] == "start")
    resting = 2 * 6 * (3 * 8 * 16 + 8 + 8 + 16)  # layers, experts, their matrices and biases
    assert start["active_parameters"] == start["parameters"] - resting
    steps = [event for event in events if event["kind"] == "step"]
    for event in steps:
        assert [1 <= busiest <= 8 for busiest in event["expert_load_max"]] == [True, True]
        assert [0 < entropy <= 1 for entropy in event["expert_load_entropy"]] == [True, True]
        assert event["z_loss"] > 0
        assert event["balance_loss"] == pytest.approx(0.02, rel=0.5)  # two layers, about even
    numbers = scalars(steps[0])
    assert numbers["train/expert_load_max/1"] == steps[0]["expert_load_max"][1]
    page = (tmp_path / "run/report.html").read_text("utf-8")
    assert "Busiest expert" in page
    assert "Auxiliary losses" in page
    assert f"{steps[-1]['expert_load_max'][1]:.2f} × the mean" in page
    assert "active parameters per token" in page


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.53, "1.5 s"),
        (59.7, "1 min 00 s"),
        (75, "1 min 15 s"),
        (7_260, "2 h 01 min"),
        (3.2e9, "37,037 d 00 h"),
    ],
)
def test_times_have_two_units(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("peaks", "shown"),
    [
        ([[2**30]], [("peak memory", "1.0 GiB")]),
        ([[2**30, 2**29], [2**31, 2**30]], [("peak memory", "1.0 GiB to 2.0 GiB each")]),
        ([[2**30, 2**30 + 1]], [("peak memory", "1.0 GiB each")]),
        ([[0]], []),
        ([], []),
    ],
)
def test_the_memory_of_each_process(peaks: list[list[int]], shown: list[tuple[str, str]]) -> None:
    assert memory({"end": [{}, *({"peak_memory": most} for most in peaks)]}) == shown


def test_the_division_among_processes_is_named() -> None:
    start = {"parameters": 1, "steps": 2}
    for parallel, named in (({"data": 2, "shard": 4}, "data 2, shard 4"), ({}, None)):
        rows = dict(figures({"start": [{**start, "parallel": parallel}]}))
        assert rows.get("processes, last session") == named


def test_the_slowest_of_several_processes() -> None:
    """If the number of processes has changed, only the last number counts."""
    assert slowest([{}, {"pass_seconds": [1.0]}]) == []
    steps = [{"pass_seconds": times} for times in ([9.0, 1.0], [1.0, 2.0, 4.0], [3.0, 2.0, 4.0])]
    assert slowest(steps) == [("slowest rank", "rank 2, 4 s per step; median 2 s")]


def test_goodput_counts_what_a_kill_cost_and_no_pause() -> None:
    def at(*times: float) -> list[Event]:
        return [{"time": time} for time in times]

    assert goodput({"start": at(0), "end": at(100)}, useful=90) == []
    assert goodput({"start": at(0, 500), "end": at(100, 600)}, useful=190) == []
    # killed before 60, ended by a signal at 100, resumed from 500 to 600
    [(name, part)] = goodput({"start": at(0, 60, 500), "end": at(100, 600)}, useful=150)
    assert (name, part) == ("goodput: useful part of the time", "75%")
    assert goodput({"start": [{}, {}], "end": [{}]}, useful=1) == []


def test_the_environment_is_readable_and_leaves_out_what_is_empty() -> None:
    start = {"kind": "start", "step": 0, "name": "x", "time": 1795764044.44872, "settings": []}
    start |= {"parallel": {}, "threads": 2, "peak_flops": 1.287e12, "parameters": 1675000}
    start |= {"versions": {"workhorse": "0.1", "torch": "2.13.0"}, "device": "cpu"}
    assert environment(start) == [
        ("threads", "2"),
        ("parameters", "1,675,000"),
        ("versions", "workhorse 0.1, torch 2.13.0"),
        ("device", "cpu"),
        ("began", "2026-11-27 07:20:44 UTC"),
        ("peak flops per second", "1.287T"),
    ]
    assert environment({}) == []
    (parallel,) = environment({"parallel": {"data": 2, "tensor": 4}})
    assert parallel == ("parallel", "data 2, tensor 4")


def test_a_description_keeps_only_the_line_breaks_that_mean_something() -> None:
    written = "Two\nlines.\n\nA list:\n- of one\n- of two\n  indented\nEnd\n"
    assert reflowed(written) == "Two lines.\n\nA list:\n- of one\n- of two\n  indented End"
