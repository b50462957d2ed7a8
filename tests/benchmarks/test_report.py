"""The results page shows the stored results."""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness import command


def entry(name: str, ratio: float | None) -> dict[str, object]:
    return {
        "name": name,
        "median": 12345.6,
        "values": [12345.6],
        "ratio": ratio,
        "achieved": 20.0,
        "of_limit": 0.8,
        "peak_bytes": 512 << 20,
        "build_seconds": 1.5,
        "note": "untied head" if ratio else "",
    }


def result(case: str, date: str = "2026-01-02") -> dict[str, object]:
    return {
        "case": case,
        "unit": "tokens/s",
        "rounds": 9,
        "entries": [entry("Workhorse", None), entry("slow", 2.5), entry("fast", 1.25)],
        "limit": "memory read",
        "limit_unit": "GB/s",
        "limit_median": 25.0,
        "missing": ["litgpt: the package litgpt is not installed"],
        "command": "python -m benchmarks.decode",
        "date": date,
        "machine": {"processor": "A CPU", "instructions": ""},
        "versions": {"torch": "2.13.0"},
    }


def test_a_stored_result_becomes_a_table():
    page = report.render({"decode": [result("160m bfloat16")]}, parts=["## By hand\n"])

    assert "## Decoding one text" in page
    row = "| 160m bfloat16 | fast | 12,346 tokens/s | 20.0 GB/s | 80% | 1.25 × | 512 MiB | 1.5 s |"
    assert row in page
    assert "- 160m bfloat16: the limit, memory read, was 25.0 GB/s." in page
    assert page.count("- slow: untied head.") == 1
    assert "- litgpt: the package litgpt is not installed." in page
    assert (
        "`python -m benchmarks.decode`, 9 rounds, 2026-01-02, on A CPU; with torch 2.13.0" in page
    )
    assert page.endswith("## By hand\n")


def test_each_figure_keeps_its_own_date():
    page = report.render({"decode": [result("a"), result("b", date="2026-03-04")]})

    assert "a: `python -m benchmarks.decode`, 9 rounds, 2026-01-02" in page
    assert "b: `python -m benchmarks.decode`, 9 rounds, 2026-03-04" in page


def test_the_plot_shows_the_fastest_peer(tmp_path: Path):
    results = {"decode": [result("160m bfloat16")]}
    assert report.against_best(results) == [("decode: 160m bfloat16", "fast", 1.25)]
    assert not report.plot({}, tmp_path / "plot.svg")

    pytest.importorskip("matplotlib")
    assert report.plot(results, tmp_path / "plot.svg")
    assert "160m bfloat16" in (tmp_path / "plot.svg").read_text()


def test_a_case_measured_again_takes_its_old_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    command.store("decode", [result("a"), result("b")])
    command.store("decode", [result("a", date="2026-03-04")])

    stored = json.loads((tmp_path / "decode.json").read_text())
    assert [(one["case"], one["date"]) for one in stored] == [
        ("a", "2026-03-04"),
        ("b", "2026-01-02"),
    ]


def test_a_command_holds_no_path_of_the_machine(tmp_path: Path):
    said = command.command_line("train", ["--nanogpt", str(tmp_path), "--save", "--quick"])

    assert said == "python -m benchmarks.train --nanogpt PATH --quick"
