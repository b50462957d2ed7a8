import math
import xml.etree.ElementTree as ET

import pytest

from workhorse.train.report.chart import MAX_POINTS, Series, line_chart, shown, thinned, ticks

SVG = {"svg": "http://www.w3.org/2000/svg"}


def test_a_chart_is_well_formed_and_draws_every_series():
    chart = line_chart(
        "Loss <nats>", [Series("a & b", [(1, 2.0), (5, 1.0)]), Series("c", [(3, 1.5)], marked=True)]
    )
    root = ET.fromstring(chart)
    assert len(root.findall("polyline")) == 2
    assert root.find("circle/title").text == "step 3: 1.5"
    assert "Loss <nats>" in "".join(root.itertext())


def test_higher_values_are_drawn_higher_and_later_steps_further_right():
    points = ET.fromstring(line_chart("", [Series("", [(0, 1.0), (10, 3.0)])])).find("polyline")
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in points.get("points").split())
    assert x0 < x1
    assert y0 > y1  # SVG counts from the top


def test_nothing_to_draw_is_no_chart():
    assert line_chart("Loss", [Series("a", []), Series("b", [(1, math.nan)])]) == ""


def test_a_spike_does_not_flatten_the_rest():
    values = [(step, 1 + step / 100) for step in range(100)] + [(100, 1e6)]
    labels = [
        node.text for node in ET.fromstring(line_chart("", [Series("", values)])).iter("text")
    ]
    assert "1M" not in labels
    assert "2" in labels


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
        (1e-4, "1.00e-04"),
    ],
)
def test_numbers_read_as_a_person_would_write_them(value, text):
    assert shown(value) == text


def test_a_band_encloses_its_line():
    band = [(0, 1.0, 3.0), (10, 2.0, 4.0)]
    root = ET.fromstring(line_chart("", [Series("", [(0, 2.0), (10, 3.0)], band=band)]))
    outline = [
        tuple(map(float, pair.split(","))) for pair in root.find("polygon").get("points").split()
    ]
    spots = [
        tuple(map(float, pair.split(","))) for pair in root.find("polyline").get("points").split()
    ]
    assert len(outline) == 4
    for x, y in spots:
        edges = [other for across, other in outline if across == x]
        assert min(edges) < y < max(edges)


def test_every_line_has_a_colour_and_a_place_in_the_legend():
    names = [f"a rather long name {number}" for number in range(10)]
    root = ET.fromstring(line_chart("Loss", [Series(name, [(0, 1.0), (1, 2.0)]) for name in names]))
    assert len(root.findall("polyline")) == 10
    rows = [node for node in root.iter("text") if node.get("class") == "legend"]
    assert len({node.get("y") for node in rows}) == 10
    assert float(root.get("viewBox").split()[3]) > float(rows[-1].get("y"))
