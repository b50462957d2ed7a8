import json
import math
import xml.etree.ElementTree as ET

import pytest

from workhorse.train.report.chart import (
    MAX_POINTS,
    SMOOTHED_FROM,
    Series,
    line_chart,
    shown,
    smoothed,
    thinned,
    ticks,
)

SVG = {"svg": "http://www.w3.org/2000/svg"}


def test_a_chart_is_well_formed_and_draws_every_series():
    chart = line_chart(
        "Loss <nats>", [Series("a & b", [(1, 2.0), (5, 1.0)]), Series("c", [(3, 1.5)], marked=True)]
    )
    root = ET.fromstring(chart)
    assert len(root.findall(".//polyline")) == 2
    assert len(root.findall(".//circle")) == 1
    told = root.find("svg").get("aria-label")
    assert "a & b from 2 to 1, lowest 1, highest 2. c from 1.5 to 1.5" in told
    assert "Loss <nats>" in "".join(root.itertext())


def test_higher_values_are_drawn_higher_and_later_steps_further_right():
    points = ET.fromstring(line_chart("", [Series("", [(0, 1.0), (10, 3.0)])])).find(".//polyline")
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in points.get("points").split())
    assert x0 < x1
    assert y0 > y1  # SVG counts from the top


def test_nothing_to_draw_is_no_chart():
    assert line_chart("Loss", [Series("a", []), Series("b", [(1, math.nan)])]) == ""


def test_a_spike_does_not_flatten_the_rest_and_is_named():
    values = [(step, 1 + step / 100) for step in range(100)] + [(100, 1e6)]
    root = ET.fromstring(line_chart("", [Series("", values)]))
    labels = [node.text for node in root.iter("text")]
    assert "1M" not in labels
    assert "2" in labels
    assert "1 of 101 values are higher, up to 1M" in "".join(root.itertext())


@pytest.mark.parametrize(
    "values",
    [
        (100.0, 195.0),
        (0.01, 0.02),
        (*[5.0] * 60, 6.0),  # 98 % of the values are equal
        tuple(range(50)),
        (*range(60), 150),
    ],
)
def test_the_largest_value_is_drawn_unless_it_is_a_spike(values):
    root = ET.fromstring(line_chart("", [Series("", list(enumerate(values)))]))
    points = [pair.split(",") for pair in root.find(".//polyline").get("points").split()]
    drawn = dict(zip(values, (float(y) for _, y in points), strict=True))
    marks = [node for node in root.iter("text") if node.get("class") == "y"]
    (low, bottom), (high, top) = (
        (float(m.text), float(m.get("y")) - 4) for m in marks[:: len(marks) - 1]
    )
    assert high >= max(values)
    for value, y in drawn.items():
        assert y == pytest.approx(bottom + (value - low) / (high - low) * (top - bottom), abs=0.11)


def test_the_legend_has_the_last_value_and_the_points_are_means():
    count = 3 * MAX_POINTS
    line = Series("a", [(step, float(step)) for step in range(count)])
    text = "".join(ET.fromstring(line_chart("", [line])).itertext())
    assert f"a {shown(count - 1.0)}each point is the mean of up to 3 values" in text
    told = ET.fromstring(line_chart("", [line])).find("svg").get("aria-label")
    assert f"from 0 to {count - 1}, lowest 0, highest {count - 1}" in told


def test_many_points_become_few_by_averaging_neighbours():
    points = [(step, float(step % 2)) for step in range(10 * MAX_POINTS)]
    few = thinned(points)
    assert len(few) == MAX_POINTS
    assert {value for _, value in few} == {0.5}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.37, 5.44), (1e-5, 3e-5), (7, 7), (-2, 900)])
def test_ticks_enclose_the_range_with_few_round_numbers(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high - 1e-12
    assert 2 <= len(found) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2500, "2500"),
        (54321, "54.32k"),
        (5475584, "5.476M"),
        (3.14e23, "314Z"),
        (1e-4, "0.0001"),
        (4.1234e-7, "4.123e-7"),
    ],
)
def test_numbers_read_as_a_person_would_write_them(value, text):
    assert shown(value) == text


def test_a_band_encloses_its_line():
    band = [(0, 1.0, 3.0), (10, 2.0, 4.0)]
    root = ET.fromstring(line_chart("", [Series("", [(0, 2.0), (10, 3.0)], band=band)]))
    outline = [
        tuple(map(float, pair.split(","))) for pair in root.find(".//polygon").get("points").split()
    ]
    spots = [
        tuple(map(float, pair.split(",")))
        for pair in root.find(".//polyline").get("points").split()
    ]
    assert len(outline) == 4
    for x, y in spots:
        edges = [other for across, other in outline if across == x]
        assert min(edges) < y < max(edges)


def test_every_line_has_a_colour_and_a_place_in_the_legend():
    lines = [Series(f"name {number}", [(0, 1.0), (1, 2.0)]) for number in range(9)]
    root = ET.fromstring(line_chart("Loss", [*lines, Series("other", [(0, 1.0)], color=3)]))
    entries = root.findall("div/span")
    assert ["".join(entry.itertext()) for entry in entries[:2]] == ["━ name 0 2", "━ name 1 2"]
    colors = [entry.find("i").get("class") for entry in entries]
    assert colors == [*(f"c{number}" for number in range(8)), "c0", "c3"]
    drawn = [line.get("class").split()[0] for line in root.findall(".//polyline")]
    assert drawn == colors


def test_the_values_of_long_lines_stay_behind_the_smoothed_line():
    noisy = [(step, step + 3 * (-1.0) ** step) for step in range(SMOOTHED_FROM)]
    raw, smooth = ET.fromstring(line_chart("", [Series("", noisy)])).findall(".//polyline")
    assert json.loads(raw.get("data-values")) == [list(point) for point in noisy]
    assert raw.get("class") == "c0 raw"
    assert smooth.get("data-values") is None
    inner = smoothed(noisy)[5:-5]
    assert max(abs(value - step) for step, value in inner) < 0.7
    assert smoothed(noisy)[0] == noisy[0]
    rising = [(x, min(x, 10.0)) for x, _ in noisy]  # not noisy: drawn as it is
    assert len(ET.fromstring(line_chart("", [Series("", rising)])).findall(".//polyline")) == 1
    (short,) = ET.fromstring(line_chart("", [Series("", noisy[1:])])).findall(".//polyline")
    assert short.get("class") == "c0 plain"


@pytest.mark.parametrize(
    ("values", "labels"),
    [((1e-3, 10.0), ["0.001", "0.01", "0.1", "1", "10"]), ((0.0, 10.0), ["0", "2", "4"])],
)
def test_an_axis_is_logarithmic_if_the_values_allow_it(values, labels):
    chart = ET.fromstring(line_chart("", [Series("", list(enumerate(values)))], log=True))
    found = [node.text for node in chart.iter("text") if node.get("class") == "y"]
    assert found[: len(labels)] == labels


def test_an_axis_includes_the_values_that_it_must():
    chart = ET.fromstring(line_chart("", [Series("", [(0, 0.4), (1, 0.5)])], include=(0, 1)))
    found = [node.text for node in chart.iter("text") if node.get("class") == "y"]
    assert (found[0], found[-1]) == ("0", "1")
