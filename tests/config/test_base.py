"""Configs: strict, frozen, round trips, YAML 1.2, overrides, and one-line errors."""

import math
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from workhorse.config.base import Config, ConfigError, parse_yaml, read_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.errors import WorkhorseError, nearest


class RoundConfig(Config):
    kind: Literal["round"] = "round"
    radius: float = Field(default=1.0, gt=0)


class SquareConfig(Config):
    kind: Literal["square"] = "square"
    side: float = 1.0
    rotated: bool = False

    def model_post_init(self, _context: object) -> None:
        if self.rotated and self.side > 10:
            raise ConfigError(f"side={self.side} is too wide to turn; choose at most 10", "side")


Shape = Annotated[RoundConfig | SquareConfig, Field(discriminator="kind")]


class DrawingConfig(Config):
    width: int = Field(gt=0)
    name: str = "untitled"
    shape: Shape = RoundConfig()
    named: dict[str, Shape] = Field(default={})
    order: tuple[str, ...] = ()
    grid: SquareConfig | None = None
    columns: int | Literal["auto"] | None = None
    tilt: Annotated[float | None, Field(ge=-0.5, lt=1)] = None
    copies: int = Field(default=1, gt=0, le=9)
    seed: int = Field(default=0, ge=0, lt=2**63)
    bold: bool = False
    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    page: Path | None = None


DRAWING = DrawingConfig(
    width=3,
    shape=SquareConfig(side=2.5),
    named={"square": RoundConfig(radius=1e-5), "b": SquareConfig()},
    order=("a", "b"),
)


def test_round_trips() -> None:
    assert DrawingConfig.from_yaml(DRAWING.to_yaml()) == DRAWING
    assert DrawingConfig.from_json(DRAWING.to_json()) == DRAWING
    assert DrawingConfig.from_dict(DRAWING.to_dict()) == DRAWING
    assert pickle.loads(pickle.dumps(DRAWING)) == DRAWING


def test_every_field_is_written_out() -> None:
    """A saved config must not change when a later version changes a default."""
    assert DRAWING.to_dict() == {
        "width": 3,
        "name": "untitled",
        "shape": {"kind": "square", "side": 2.5, "rotated": False},
        "named": {
            "square": {"kind": "round", "radius": 1e-5},
            "b": {"kind": "square", "side": 1.0, "rotated": False},
        },
        "order": ["a", "b"],
        "grid": None,
        "columns": None,
        "tilt": None,
        "copies": 1,
        "seed": 0,
        "bold": False,
        "shares": {},
        "page": None,
    }


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DRAWING.width = 4


def test_replace_checks_the_rules() -> None:
    assert DRAWING.replace(width=5).width == 5
    assert DRAWING.width == 3
    with pytest.raises(ConfigError, match="too wide to turn"):
        SquareConfig(side=11).replace(rotated=True)
    with pytest.raises(ConfigError, match="unknown key 'depth'"):
        DRAWING.replace(depth=5)


ERRORS = [
    ({"width": 3, "nmae": "x"}, "unknown key 'nmae'; did you mean 'name'?"),
    (
        {"width": 3, "zzz": "x"},
        "unknown key 'zzz'; known: bold, columns, copies, grid, name, named, order, page, seed, "
        "shape, shares, tilt, width",
    ),
    ({}, "'width' is missing; give a whole number of 1 or more"),
    ({"width": 0}, "width: 0 is too small; give a whole number of 1 or more"),
    ({"width": "three"}, "width: 'three' is not a whole number; give one of 1 or more"),
    (
        {"width": 3, "columns": "three"},
        "columns: 'three' is not allowed; give a whole number, 'auto' or null",
    ),
    ({"width": 3, "columns": "Auto"}, "columns: 'Auto' is not allowed; did you mean 'auto'?"),
    ({"width": 3, "columns": 2.5}, "columns: 2.5 is not allowed; give a whole number, 'auto' or"),
    ({"width": 3, "name": 7}, "name: 7 is not a string; give a string, such as '7'"),
    ({"width": 3, "order": [7]}, "order.0: 7 is not a string; give a string, such as '7'"),
    ({"width": 3, "tilt": 1}, "tilt: 1 is too large; give a number from -0.5 to below 1 or null"),
    ({"width": 3, "tilt": "x"}, "tilt: 'x' is not a number; give one from -0.5 to below 1 or null"),
    ({"width": 3, "copies": 0}, "copies: 0 is too small; give a whole number from 1 to 9"),
    ({"width": 3, "seed": -1}, "seed: -1 is too small; give a whole number of 0 or more"),
    ({"width": 3, "bold": "very"}, "bold: 'very' is not allowed; give true or false"),
    ({"width": 3, "shares": {"a": 0}}, "shares.a: 0 is too small; give a number above 0"),
    (
        {"width": 3, "page": 3},
        "page: 3 is not a path; give the path of a file or folder or null",
    ),
    (
        {"width": 10**30},
        "width: a whole number is larger than 2^63 - 1; choose a smaller one",
    ),
    ({"width": 3, "shape": "rond"}, "shape: unknown kind 'rond'; did you mean 'round'?"),
    ({"width": 3, "grid": 7}, "grid: expected settings, got 7; write key: value, or {key: "),
    ({"width": 3, "order": {"a": 1}}, "order: expected a list, and {'a': 1} is not a list"),
    ({"width": 2.5}, "width: 2.5 is not a whole number; give one of 1 or more"),
    ({"width": True}, "width: true is not allowed; give a whole number of 1 or more"),
    ({"width": None}, "width: null is not a whole number; give one of 1 or more"),
    ({"width": 3, "order": "ab"}, "order: expected a list, and 'ab' is a string; write ['ab']"),
    (
        {"width": 3, "shape": {"kind": "sqare"}},
        "shape: unknown kind 'sqare'; did you mean 'square'?",
    ),
    ({"width": 3, "shape": {"kind": "ball"}}, "shape: unknown kind 'ball'; known: round, square"),
    (
        {"width": 3, "shape": {"radius": 1}},
        "shape: 'kind' is missing; known: round, square",
    ),
    ({"width": 3, "shape": 7}, "shape: expected settings, got 7; write key: value"),
    (
        {"width": 3, "shape": {"kind": "round", "radios": 1}},
        "shape: unknown key 'radios'; did you mean 'radius'?",
    ),
    (
        {"width": 3, "shape": {"kind": "round", "radius": -1}},
        "shape.radius: -1 is too small; give a number above 0",
    ),
    (
        {"width": 3, "shape": {"kind": "round", "radius": math.nan}},
        "shape.radius: nan is not a finite number; give a number above 0",
    ),
    (
        {"width": 3, "named": {"square": {"kind": "square", "sid": 1}}},
        "named.square: unknown key 'sid'; did you mean 'side'?",
    ),
    (
        {"width": 3, "named": {"a": {"kind": "square", "side": 11, "rotated": True}}},
        "named.a.side: side=11.0 is too wide to turn; choose at most 10",
    ),
    ({"width": 3, "grid": {"side": "wide"}}, "grid.side: 'wide' is not a number; give a number"),
]


@pytest.mark.parametrize(("data", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_the_place_the_value_and_the_remedy(
    data: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DrawingConfig.from_dict(data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_config_error_is_a_users_error() -> None:
    assert issubclass(ConfigError, WorkhorseError)
    assert issubclass(WorkhorseError, ValueError)


@pytest.mark.parametrize("data", [None, [1], "text", 3])
def test_a_config_needs_a_mapping(data: object) -> None:
    with pytest.raises(ConfigError, match=r"^expected settings, each as `key: value`, got "):
        DrawingConfig.from_dict(data)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        DrawingConfig.from_dict({"width": "very " * 1000})
    assert len(str(caught.value)) < 250


def test_bad_json() -> None:
    with pytest.raises(ConfigError, match=r"^the text is not valid JSON: .*: line 2 column 1$"):
        DrawingConfig.from_json('{"width": \n}')


SCALARS = {
    "3e-4": 3e-4,
    "1e5": 1e5,
    "1E5": 1e5,
    "-.5e+3": -500.0,
    "+1.5": 1.5,
    "2.": 2.0,
    "12": 12,
    "-7": -7,
    "true": True,
    "False": False,
    "yes": "yes",
    "on": "on",
    "no": "no",
    "null": None,
    "~": None,
    ".inf": math.inf,
    "1.2.3": "1.2.3",
    "e5": "e5",
    "2024-01-01": "2024-01-01",
    "1:30": "1:30",
    "'3e-4'": "3e-4",
}


@pytest.mark.parametrize("text", SCALARS)
def test_yaml_1_2_scalars(text: str) -> None:
    """YAML 1.1 would read `3e-4` as a string, `on` as true and `1:30` as 90."""
    value = parse_yaml(f"key: {text}")["key"]
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


BAD_YAML = [
    ("a: [1", "not valid YAML at line 1, column 6: "),
    ("a: 1\na: 2", "not valid YAML at line 2, column 1: key 'a' is given twice; keep one"),
    ("\ta: 1", "not valid YAML at line 1, column 1: "),
    ("a: *b", "not valid YAML at line 1, column 4: found undefined alias 'b'"),
    (
        "!!python/object:os.system x",
        "not valid YAML at line 1, column 1: '!!python/object:os.system' is",
    ),
    ("? [1]\n: 2", "not valid YAML at line 1, column "),
    ("a: \x00", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD_YAML)
def test_what_is_not_yaml(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("width: 3\nname: große Zeichnung\n", encoding="utf-8")
    assert read_yaml(path) == {"width": 3, "name": "große Zeichnung"}
    path.write_text("- 1\n- 2\n")
    with pytest.raises(
        ConfigError, match=r"recipe\.yaml: expected settings, each as `key: value`, got \[1"
    ):
        read_yaml(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is empty; write settings"):
        read_yaml(path)
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not valid YAML at line 2, column 1: "):
        read_yaml(path)
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not UTF-8: bad byte at offset 6$"):
        read_yaml(path)
    with pytest.raises(
        ConfigError,
        match=r"^cannot read .*missing.yaml: No such file or directory; check the path$",
    ):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"^cannot read .*: it is a folder; give a"):
        read_yaml(tmp_path)


def test_overrides() -> None:
    data = {"train": {"lr": 0.1, "steps": 5}, "name": "x"}
    changed = apply_overrides(
        data, ["train.lr=3e-4", "model.blocks.main={d_ff: 8}", "name=a=b", "order=[a, b]", "name2="]
    )
    assert changed == {
        "train": {"lr": 3e-4, "steps": 5},
        "model": {"blocks": {"main": {"d_ff": 8}}},
        "name": "a=b",
        "order": ["a", "b"],
        "name2": None,
    }
    assert data == {"train": {"lr": 0.1, "steps": 5}, "name": "x"}  # not changed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lr", "'train.lr' is not a setting; write section.key=value"),
        ("=3", "'=3' is not a setting; write section.key=value"),
        ("name.first=x", "name holds 'x', not settings; check 'name.first=x'"),
        ("train.lr.a=1", "train.lr holds 0.1, not settings; check 'train.lr.a=1'"),
        ("train..lr=1", "'train..lr=1' is not a setting; write section.key=value"),
        ("a." * 999 + "b=1", "'a.a.a.a."),
        ("train.lr=[1", "'train.lr=[1' is not valid YAML at line 1, column 3: "),
    ],
)
def test_overrides_that_cannot_be(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"train": {"lr": 0.1}, "name": "x"}, [setting])
    assert str(caught.value).startswith(message)


def test_another_kind_begins_a_section_afresh() -> None:
    data = {"a": {"kind": "x", "size": 1}, "b": {"size": 1}}
    changed = apply_overrides(data, ["a.width=3", "a.kind=y", "b.kind=y"])
    assert changed == {"a": {"kind": "y", "width": 3}, "b": {"size": 1, "kind": "y"}}
    kept = apply_overrides(data, ["a.kind=y"], lambda place, section, kind: {place: kind})
    assert kept["a"] == {"a": "y", "kind": "y"}


@pytest.mark.parametrize("text", ["{kind:rope}", "[{kind: a, d_ff:64}]", "{a: {kind:rope, b: 1}}"])
def test_a_colon_without_a_space_is_told(text: str, tmp_path: Path) -> None:
    message = r"YAML parses '[a-z_]+:[a-z0-9]+' as one key without a value; add a space after"
    with pytest.raises(ConfigError, match=f"^model(.a)?: {message} the colon: '"):
        apply_overrides({}, [f"model={text}"])
    (tmp_path / "recipe.yaml").write_text(f"model: {text}")
    with pytest.raises(ConfigError, match=rf"recipe.yaml: model(.a)?: {message}"):
        read_yaml(tmp_path / "recipe.yaml")


def test_an_override_of_an_aliased_section_leaves_the_other() -> None:
    data = parse_yaml("a: &shape {size: 1}\nb: *shape\n")
    assert apply_overrides(data, ["b.size=2"]) == {"a": {"size": 1}, "b": {"size": 2}}


def test_the_nearest_name() -> None:
    assert nearest("n_heds", ["n_heads", "d_model"]) == "did you mean 'n_heads'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    assert nearest("zzz", []) == "known: none"


@pytest.mark.parametrize(
    ("setting", "value"), [("shape=round", "round"), ("named.a=square", "square")]
)
def test_a_word_stands_for_its_kind(setting: str, value: str) -> None:
    drawing = DrawingConfig.from_dict(apply_overrides(DRAWING.to_dict(), [setting]))
    assert value in {drawing.shape.kind, drawing.named.get("a", drawing.shape).kind}


def test_an_override_is_named_with_its_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({}, ["data.glob=[*"])
    assert str(caught.value).startswith("'data.glob=[*' is not valid YAML at line 1, column ")
    assert str(caught.value).endswith("""; if it is a string, quote it: "data.glob='[*'\"""")
    assert apply_overrides({}, ["data.glob='[*'"]) == {"data": {"glob": "[*"}}


@pytest.mark.parametrize("value", ["**/*", "'**/*'"])
def test_a_pattern_needs_no_quotes(value: str) -> None:
    assert apply_overrides({}, [f"data.glob={value}"]) == {"data": {"glob": "**/*"}}


def test_a_lone_dash_is_the_standard_input() -> None:
    assert apply_overrides({}, ["data.path=-"]) == {"data": {"path": "-"}}


@pytest.mark.parametrize("text", [None, 5, [], {}, b"size: 1"])
def test_yaml_and_json_are_texts(text: Any) -> None:
    for read, language in ((DrawingConfig.from_yaml, "YAML"), (DrawingConfig.from_json, "JSON")):
        with pytest.raises(
            ConfigError, match=rf"^{language} must be a string, not .*; for a dict, use from_dict"
        ):
            read(text)


def test_the_name_of_a_file_is_no_yaml_of_settings() -> None:
    with pytest.raises(
        ConfigError, match=r"^expected settings, got 'r\.yaml'; to read a file, use read_yaml"
    ):
        DrawingConfig.from_yaml("r.yaml")
