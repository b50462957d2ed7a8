"""Conversions that are not possible raise a one-line error, and write nothing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import workhorse
from workhorse.checkpoints.tensors import check_numbers
from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError
from workhorse.model.convert import ADAPTERS, DTypeName, Format, convert
from workhorse.model.model import describe
from workhorse.run import train
from workhorse.tokenizers import (
    load_tokenizer,
)
from workhorse.train import Recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "stdlib-small.yaml"
MODELS: list[Format] = [one for one in get_args(Format) if one not in ADAPTERS]
HALVES: list[tuple[Format, DTypeName]] = [("hf", "float16"), ("workhorse", "float16")]


@pytest.mark.parametrize("to", MODELS)
def test_a_quantised_model_is_not_written(to: Format, run_folder: Path, tmp_path: Path) -> None:
    quantised = workhorse.load(run_folder, quantize="int8")
    with pytest.raises(WorkhorseError, match=r"to int8, which cannot be written; load .* without"):
        convert(quantised, tmp_path / "other", to)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_written_is_refused_before_any_weight_is_made(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="no transformers class can represent this model"):
        convert("palm-540b", tmp_path / "hf", "hf")
    with pytest.raises(WorkhorseError, match="nothing does not exist"):
        convert("nothing", tmp_path / "hf", "hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["zip", None])
def test_an_unknown_format_is_refused_and_nothing_is_written(
    to: Any, run_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkhorseError, match=r"^to=.* is unknown; choose hf, workhorse, gguf"):
        convert(run_folder, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["checkpoints/step-00000099", "data/new", "tokenizer/x.gguf"])
def test_nothing_is_written_among_the_files_of_a_run(run_folder: Path, place: str) -> None:
    to: Format = "gguf" if place.endswith("gguf") else "workhorse"
    with pytest.raises(WorkhorseError, match="is inside a run directory; choose a path outside"):
        convert(run_folder, run_folder / place, to)
    assert not (run_folder / place).exists()


@pytest.mark.parametrize("dtype", ["zip", "int8", None, torch.float32])
def test_an_unknown_number_format_is_refused_and_nothing_is_written(
    run_folder: Path, tmp_path: Path, dtype: Any
) -> None:
    expected = "is unknown; choose auto, float32, bfloat16, float16, q8_0, q4_0, q4_k$"
    with pytest.raises(WorkhorseError, match=expected):
        convert(run_folder, tmp_path / "out", "workhorse", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_model(run_folder: Path) -> None:
    with pytest.raises(
        WorkhorseError,
        match=r"recipe\.yaml is a recipe, not a model; train it with workhorse train \S+ and give",
    ):
        workhorse.load(run_folder / "recipe.yaml")
    bad = run_folder / "x.gguf"
    bad.write_bytes(b"GGUF\x03")
    with pytest.raises(
        WorkhorseError,
        match=r"x\.gguf has \d+ bytes, fewer than its header: .*; download it again",
    ):
        workhorse.load(bad)


@pytest.mark.parametrize("source", [None, 5, "run\0", Path("run\0"), b"run", "\ud800"])
def test_what_is_no_name_of_a_model(source: Any, tmp_path: Path) -> None:
    rule = r"^a model is a path, a hub id or a preset's name, (not|and) .*; (give it|choose ano)"
    for use in (
        workhorse.load,
        describe,
        partial(convert, target=tmp_path / "out", to="workhorse"),
        partial(convert, target=tmp_path / "out", to="hf"),
    ):
        with pytest.raises(WorkhorseError, match=rule):
            use(source)


@pytest.mark.parametrize("place", [None, 5, b"x", "x\0", "\0", "\ud800"])
def test_a_place_that_is_no_path(place: Any, run_folder: Path) -> None:
    model = workhorse.load(run_folder)
    with pytest.raises(WorkhorseError, match=r"^a target is a path, (not|and) .*; "):
        convert(model, place, "hf")
    with pytest.raises(WorkhorseError, match=r"^a folder is a path, (not|and) .*; "):
        workhorse.save(model, place)
    with pytest.raises(WorkhorseError, match=r"^a run directory is a path, (not|and) .*; "):
        train(Recipe.from_dict(read_yaml(RECIPE)), place)
    with pytest.raises(WorkhorseError, match=r"^a YAML file is a path, (not|and) .*; "):
        read_yaml(place)
    with pytest.raises(WorkhorseError, match=r"^a tokenizer is a path, (not|and) .*; "):
        load_tokenizer(place)


@pytest.mark.parametrize("to", ["hf", "workhorse", "gguf"])
@pytest.mark.parametrize("name", ["a" * 300, "file/below"])
def test_a_place_that_the_system_refuses(
    name: str, to: Format, run_folder: Path, tmp_path: Path
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    (tmp_path / "file").write_text("x")
    model = workhorse.load(run_folder)
    place = tmp_path / name
    refused = rf"^cannot write {place}: "
    with pytest.raises(WorkhorseError, match=refused):
        convert(model, place, to, notify=lambda line: None)
    with pytest.raises(WorkhorseError, match=refused):
        workhorse.save(model, place)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "texts", "run"}


@pytest.mark.parametrize(("to", "dtype"), [(to, "float32") for to in MODELS] + HALVES)
def test_weights_that_no_model_computes_with_are_not_written(
    to: Format, dtype: DTypeName, run_folder: Path, tmp_path: Path
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    model = workhorse.load(run_folder, execution="reference")
    weight = model.decoder.final_norm.weight
    assert isinstance(weight, torch.Tensor)
    refused = (
        "NaN; use an earlier checkpoint" if dtype == "float32" else "beyond float16's range; choose"
    )
    for wrong in (torch.nan, torch.inf, -torch.inf) if dtype == "float32" else (1e5,):
        with torch.no_grad():
            weight[3] = wrong
        with pytest.raises(WorkhorseError, match=rf"norm.weight has .*{refused}"):
            convert(model, tmp_path / "out", to, dtype=dtype, notify=lambda line: None)
    empty = replace(model, reference=model.config.build(device="meta"), executed=None)
    with pytest.raises(WorkhorseError, match="on the device meta and has no weights; load or init"):
        convert(empty, tmp_path / "out", to, dtype=dtype, notify=lambda line: None)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "run"}


def test_only_a_bias_may_rule_a_token_out() -> None:
    vector = torch.tensor([0.0, -torch.inf])
    check_numbers("head.bias", vector)
    with pytest.raises(WorkhorseError, match=r"norm\.weight has infinite values or NaN"):
        check_numbers("final_norm.weight", vector)


def test_a_decoder_without_numbers_is_not_saved(run_folder: Path, tmp_path: Path) -> None:
    decoder = workhorse.load(run_folder).config.build(device="meta")
    with pytest.raises(WorkhorseError, match="on the device meta and has no weights; load or init"):
        workhorse.save(decoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
