import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import weights
from tests.train.test_balance import MIXED, recipe_of
from workhorse.checkpoints import RunDirectory
from workhorse.errors import WorkhorseError
from workhorse.run import train
from workhorse.train import StopSignals, read_metrics
from workhorse.train.report.chart import Series
from workhorse.train.report.metrics import Event, scalars
from workhorse.train.report.page import (
    SAMPLED_TIMES,
    duration,
    environment,
    figures,
    goodput,
    memory,
    reflowed,
    write_report,
)
from workhorse.train.report.panels import MOST_LINES, charts, lines_of, logged_figures


def test_a_report_shows_the_run_and_needs_no_network(make_recipe, tmp_path):
    samples = {"every": 6, "prompts": ["<1> & "], "max_new_tokens": 4}
    result = train(make_recipe(samples=samples, eval_every=4), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"{result.validation_loss:.4f}" in page
    assert f"{result.bits_per_byte:.4f}" in page
    assert "12 of 12" in page
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles.pop().startswith("Peak memory, ")  # the unit depends on what this process held
    assert titles == [
        "Loss, nats per token",
        "Bits per byte",
        "Learning rate",
        "Learning rate, AdamW part",
        "Gradient norm",
        "Tokens per second",
        "Fraction of the peak matmul rate",
    ]
    logged = [
        (event["step"], pytest.approx(event["loss"], rel=1e-6))
        for event in read_metrics(tmp_path / "run/metrics.jsonl")
        if event["kind"] == "step"
    ]
    assert values_of(page, "Loss, nats per token")["training"] == logged
    assert "&lt;1&gt; &amp; " in page  # samples are escaped
    assert "d_model" in page
    assert not re.search(r"(src|href)=|@import|url\(|https?://", page)
    assert "default-src 'none'" in page  # the browser refuses all requests


def values_of(page: str, title: str) -> dict[str, list[tuple[float, float]]]:
    """The values of the lines of a chart, by name."""
    (chart,) = re.findall(f"<figcaption>{re.escape(title)}</figcaption>.*?</svg>", page)
    lines = re.findall('data-name="(.*?)" data-values="(.*?)"', chart)
    return {name: [tuple(point) for point in json.loads(values)] for name, values in lines}


def lines(events: list[Event], figure: str, label: str = "") -> list[Series]:
    return [*lines_of(logged_figures(events)[figure], label)]


def test_validations_on_a_part_stand_apart_from_those_on_all() -> None:
    part = [{"step": n, "loss": 5.0 - n, "whole": False} for n in (1, 2)]
    part = [{"kind": "validation", **event} for event in part]
    whole = {"kind": "validation", "step": 3, "loss": 2.5, "whole": True}
    some, all_of_it = lines([*part, whole], "loss")
    assert (some.name, list(some.points)) == ("validation on a subset", [(1, 4.0), (2, 3.0)])
    assert (all_of_it.name, list(all_of_it.points)) == ("validation", [(3, 2.5)])
    assert some.marked
    assert all_of_it.marked
    step = {"kind": "step", "step": 1, "loss": 5.0}
    names = [line.name for line in lines([whole, step], "loss")]
    assert names == ["training", "validation"]
    assert [line.name for line in lines([whole, step], "loss", "a")] == ["a", "a validation"]
    start = {"parameters": 1, "steps": 9}
    named = figures({"start": [start], "validation": [{**part[0], "bits_per_byte": None}]})
    assert ("validation loss on a subset, nats per token", "4.0000") in named


def test_a_report_says_what_makes_its_curves_suspect(make_recipe, tmp_path):
    train(make_recipe(), tmp_path / "run", settings=["train.seed=3"])
    run = RunDirectory(tmp_path / "run")
    lines = run.metrics_file.read_text("utf-8").splitlines()
    skipped = '{"kind": "skipped_step", "step": 7, "loss": null, "grad_norm": null}'
    run.metrics_file.write_text("\n".join([*lines[:-1], skipped, ""]), "utf-8")
    write_report([run])
    page = run.report_file.read_text("utf-8")
    assert "1 step skipped, as loss or gradient was not finite: 7" in page
    assert "the run has not finished" in page
    assert "this run differs from the recipe file and its description: train.seed=3" in page


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
    loads = values_of(page, "Busiest expert, load / mean load")
    assert loads["mixture 1"][-1] == (12, pytest.approx(steps[-1]["expert_load_max"][1]))
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


def test_cards_show_the_end_of_the_run_rather_than_the_last_logged_step() -> None:
    start = {"step": 0, "parameters": 1, "steps": 100}
    step = {"step": 20, "tokens": 200, "seconds": 10.0, "tokens_per_second": 100.0}
    end = {"step": 24, "tokens": 240, "seconds": 12.0, "reason": "SIGINT"}
    of_kind = {"start": [start], "step": [step, step | {"tokens_per_second": 195.0}]}
    shown = dict(figures({**of_kind, "end": [end]}))
    assert (shown["steps"], shown["tokens trained on"]) == ("24 of 100", "240")
    assert shown["training time"] == "12 s"
    assert shown["tokens per second, median"] == "148"
    resumed = {**of_kind, "end": [end | {"step": 16}]}  # stopped, resumed, and killed after step 20
    assert dict(figures(resumed))["steps"] == "20 of 100"


@pytest.mark.parametrize(("peak", "drawn", "unit"), [(300, 300, "MiB"), (4096, 4, "GiB")])
def test_memory_has_the_same_unit_in_the_card_and_in_the_chart(
    tmp_path: Path, peak: int, drawn: float, unit: str
) -> None:
    events = [{"kind": "step", "step": 1, "memory": peak * 2**20, **SPEED}]
    events += [{"kind": "end", "step": 1, "reason": "finished", "peak_memory": [peak * 2**20]}]
    page = write_report([logged_run(tmp_path / "run", events)]).read_text("utf-8")
    assert values_of(page, f"Peak memory, {unit}") == {"": [(1, drawn)]}
    assert f"<b>{drawn:.1f} {unit}</b><span>peak memory" in page


def test_lists_of_values_are_drawn_as_lines_or_as_a_band() -> None:
    """If the number of processes has changed, only the last number is drawn."""
    times = ([9.0, 1.0], [1.0, 2.0, 4.0], [3.0, 2.0, 5.0])
    events = [{"kind": "step", "step": n, "pass_seconds": one} for n, one in enumerate(times)]
    found = {line.name: line.points for line in lines(events, "pass_seconds", "rank")}
    assert found["rank 2"] == [(1, 4.0), (2, 5.0)]
    many = {"kind": "step", "step": 9, "pass_seconds": [float(n) for n in range(MOST_LINES + 1)]}
    (only,) = lines([many], "pass_seconds", "rank")
    assert (only.points, only.band) == ([(9, 4.0)], [(9, 0.0, 8.0)])


def test_the_figures_of_a_run_choose_its_panels() -> None:
    """An unknown figure has a chart, and groups without figures are omitted."""
    step = {"kind": "step", "step": 1, "loss": 2.0, "warming_up": True, "swing": 3.0, "tokens": 9}
    assert [*charts({"": [step]})] == ["Loss", "Other figures"]
    (chart,) = charts({"": [step]})["Other figures"]
    assert "<figcaption>swing</figcaption>" in chart
    pair = {"kind": "step", "step": 1, "reward_chosen": 1.0, "reward_rejected": -1.0}
    assert len(charts({"": [pair]})["Rewards"]) == 1
    assert len(charts({"a": [pair], "b": [pair]})["Rewards"]) == 2


SPEED = {"tokens": 1, "seconds": 1.0, "tokens_per_second": math.pi, "peak_fraction": 0.5}


def logged_run(folder: Path, events: list[Event], kind: str = "next_token") -> RunDirectory:
    """Write a run directory that contains only a recipe and metrics."""
    folder.mkdir()
    recipe = {"name": folder.name, "data": {}, "train": {"objective": {"kind": kind}}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return RunDirectory(folder)


def sampled(step: int, text: str, **more: Any) -> Event:
    return {"kind": "samples", "step": step, "samples": [{"prompt": "p<", "text": text, **more}]}


def test_several_runs_share_charts_and_samples(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 1, **SPEED}
    runs = [
        logged_run(tmp_path / name, [step | {"loss": loss}, sampled(0, f"{name} before"), *more])
        for name, loss, more in (("base", 3.0, []), ("tuned", 2.0, [sampled(5, "tuned after")]))
    ]
    path = write_report(runs)
    assert path == tmp_path / "report.html"
    page = path.read_text("utf-8")
    values = values_of(page, "Loss, nats per token")
    assert values == {"base": [(1, 3.0)], "tuned": [(1, 2.0)]}
    first, last = re.findall("<table data-time.*?</table>", page, re.DOTALL)
    for table, tuned in ((first, "tuned before"), (last, "tuned after")):
        (row,) = re.findall("<tr><td>.*?</tr>", table, re.DOTALL)
        assert re.findall('class="text">(.*?)<', row) == ["p&lt;", "base before", tuned]
    with pytest.raises(WorkhorseError, match="runs=3 has only 2 folders"):
        write_report([*runs, runs[1]])


def test_the_validation_loss_of_rewards_is_shown_as_their_reward(tmp_path: Path) -> None:
    validation = {"kind": "validation", "step": 1, "loss": -0.25, "bits_per_byte": None}
    events = [validation | {"whole": True, "reward": 0.25, "exact_match": 0.125}]
    page = write_report([logged_run(tmp_path / "r", events, "policy")]).read_text("utf-8")
    assert "validation loss" not in page
    assert "0.1250" in page
    assert values_of(page, "Reward") == {"validation": [(1, 0.25)]}
    page = write_report([logged_run(tmp_path / "k", events, "kto")]).read_text("utf-8")
    assert "validation loss" in page


def test_rewards_come_first_and_have_a_card(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 3, "loss": 0.5, "reward": 0.75, "entropy": 1.5, **SPEED}
    run = logged_run(tmp_path / "policy", [step], "policy")
    page = write_report([run]).read_text("utf-8")
    cards = re.findall("<div><b>(.*?)</b><span>(.*?)</span>", page)
    assert cards[:2] == [("0.7500", "reward at step 3"), ("1.5000", "entropy at step 3")]
    groups = re.findall("<summary>(.*?) <small>", page)
    assert groups[:2] == ["Rewards", "Loss"]
    pairs = logged_run(tmp_path / "dpo", [{**step, "margin": 9.3}], "dpo")
    page = write_report([pairs]).read_text("utf-8")
    assert "<b>9.3000</b><span>margin at step 3" in page
    assert re.findall("<summary>(.*?) <small>", page)[:2] == ["Loss", "Rewards"]


def test_half_of_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    run = logged_run(tmp_path / "run", [sampled(1, "a\ud800b")])
    assert "a\ufffdb" in write_report([run]).read_text("utf-8")


def test_the_size_of_a_report_is_limited(tmp_path: Path) -> None:
    events: list[Event] = [
        {"kind": "step", "step": n, "loss": 1 / (n + 1), **SPEED} for n in range(20_000)
    ]
    events += [sampled(n, "x" * 10_000, reward=0.5) for n in range(300)]
    run = logged_run(tmp_path / "long", events)
    assert run.metrics_file.stat().st_size > 4_000_000
    page = write_report([run]).read_text("utf-8")
    assert len(page) < 250_000
    assert page.count("<table data-time") == SAMPLED_TIMES
    assert 'data-time="step 0"' in page
    assert 'data-time="step 299"' in page
    assert "reward 0.5" in page


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
