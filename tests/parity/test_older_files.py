"""Config files written before transformers 5, like most published ones: other keys, same model.

Missing keys and keys with older names must have the same meaning as in transformers, and every key
must be read.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.parity.all_cases import ALL
from tests.parity.reference import quiet, their_config
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import MODEL_TYPES, Fields, family
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.models.huggingface.fields import ALIASES, OLDER, SILENT, with_own_names
from workhorse.models.huggingface.rotation import BESIDE, conflicting_settings

_TEXT = Path(__file__).with_name("older.yaml").read_text(encoding="utf-8")
FILES: dict[str, dict[str, Any]] = yaml.safe_load(_TEXT)["files"]
READ_ONLY = {"mpt-7b-storywriter"}
"""Files with settings that transformers ignores: ALiBi's slopes in MPT."""


@pytest.mark.parametrize("name", FILES)
def test_an_older_file_means_what_transformers_reads_in_it(name: str) -> None:
    file = FILES[name]
    with quiet(), torch.device("meta"):
        theirs = hf.AutoConfig.for_model(**deepcopy(file))  # transformers modifies nested mappings
        model = hf.AutoModelForCausalLM.from_config(theirs)
    reader = family(file["model_type"])
    fields = Fields(with_own_names(file)[0])
    ours = reader.read(fields)
    assert fields.unused() == []
    parsed = reader.read(Fields(theirs.to_dict()))
    assert list(compare_plain(plain(ours), plain(parsed))) == []
    assert (reader.difference(ours) is None) == (name not in READ_ONLY)
    assert n_parameters(ours.build(device="meta")) == n_parameters(model)


def n_parameters(model: nn.Module) -> int:
    """Number of trainable parameters. Load-balancing biases are buffers in some families."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("model_type", ALL)
def test_rope_scaling_beside_rope_parameters_means_what_it_means_there(model_type: str) -> None:
    """Such files occur if a user adds a scaling by hand to a file of transformers 5."""
    with quiet():
        file = their_config(model_type, ALL[model_type][0]).to_dict()
        if not file.get("rope_parameters"):
            pytest.skip("it has no rope_parameters")
        file["rope_scaling"] = dict(YARN)
        try:
            theirs = hf.AutoConfig.for_model(**deepcopy(file)).to_dict()
        except Exception as error:
            pytest.skip(f"transformers refuses it: {error}")
    try:
        expected = family(model_type).read(Fields(theirs))
    except WorkhorseError as error:
        pytest.skip(f"not supported here: {error}")
    ours = family(model_type).read(Fields(file))
    assert list(compare_plain(plain(ours), plain(expected))) == []
    expected = "rope_scaling differs from rope_parameters; rope_scaling is used"
    assert any(one.startswith(expected) for one in conflicting_settings(file))


def test_every_second_name_of_a_key_is_known() -> None:
    """`num_mtp_layers` is excluded: it counts layers for multi-token prediction."""
    for model_type in MODEL_TYPES:
        if model_type in CONFIG_MAPPING:
            there = dict(CONFIG_MAPPING[model_type].attribute_map)
            there.pop("num_mtp_layers", None)
            assert ALIASES.get(model_type, {}) == there


REFUSED_THERE = ("num_hidden_layers", "qkv_bias", "bias")
"""Keys that must agree with other keys: the length of lists, biases of other layers."""


@pytest.mark.parametrize("model_type", ALL)
def test_of_two_names_the_same_counts_as_there(model_type: str) -> None:
    """The same key counts in either order; a remark reports the ignored value."""
    with quiet():
        file = their_config(model_type, ALL[model_type][0]).to_dict()
    names = {**ALIASES.get(model_type, {}), **OLDER.get(model_type, {})}
    for usual, own in names.items():
        value = file[own]
        other = not value if isinstance(value, bool) else 2 * value
        for both in ({usual: other, own: value}, {own: value, usual: other}):
            written = {key: it for key, it in file.items() if key not in both} | both
            ours, remarks = with_own_names(written)
            assert usual not in ours
            assert len(remarks) == 1
            assert f"{own}={value}" in remarks[0]
            try:
                with quiet():
                    theirs = hf.AutoConfig.for_model(**deepcopy(written))
            except Exception:
                assert usual in REFUSED_THERE
                continue
            assert ours[own] == getattr(theirs, own)
        assert with_own_names({**file, usual: value})[1] == []
    written = {**file, "dtype": "float16", "torch_dtype": "bfloat16"}
    ours, remarks = with_own_names(written)
    assert len(remarks) == 1
    assert (
        ours["dtype"] == str(hf.AutoConfig.for_model(**deepcopy(written)).dtype).partition(".")[2]
    )


def test_a_usual_name_that_the_class_does_not_know_is_named() -> None:
    with quiet():
        file = their_config("falcon", ALL["falcon"][0]).to_dict()
    before, _ = understood(file)
    assert understood(file | {"intermediate_size": 8}) == (before, ["intermediate_size"])


OVERRIDDEN = ("granite_swa", "granitemoe_swa")
"""Types in which each layer may have its own theta."""


@pytest.mark.parametrize("model_type", ALL)
def test_a_key_beside_a_rotation_means_what_it_means_there(model_type: str) -> None:
    """Tested with `rope_parameters` and, as in older files, without. Ignored keys are reported."""
    with quiet():
        saved = their_config(model_type, ALL[model_type][0]).to_dict()
    older = {key: value for key, value in saved.items() if key != "rope_parameters"}
    for file, (key, inner) in product((saved, older), BESIDE.items()):
        beside = {key: 7000.0 if inner == "rope_theta" else 0.75}
        before, _ = understood(file)
        try:
            with quiet():
                theirs = hf.AutoConfig.for_model(**deepcopy(file), **beside).to_dict()
        except Exception:
            continue
        expected, _ = understood(theirs)
        ours, said = understood(file | beside)
        assert list(compare_plain(ours, expected)) == []
        if ours == before and "rope" in str(ours) and model_type not in OVERRIDDEN:
            assert any(key in line for line in said)


@pytest.mark.parametrize("model_type", ALL)
def test_unknown_keys_are_named_wherever_they_stand(model_type: str) -> None:
    with quiet():
        file = their_config(model_type, ALL[model_type][0]).to_dict()
    for at in mappings(file):
        changed = deepcopy(file)
        reduce(getitem, at, changed)["new_trick"] = 1
        _, said = understood(changed)
        assert len(said) == 1
        assert "new_trick" in said[0]
        assert all(key in said[0] for key in at)


def understood(values: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The config read from a file (None if refused), and its unused keys and remarks."""
    fields = Fields(values)
    try:
        ours = plain(family(values["model_type"]).read(fields))
    except WorkhorseError as error:
        return None, [str(error)]
    return ours, [*fields.unused(), *conflicting_settings(values)]


def mappings(file: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a file's mappings, except for layer types that it does not have."""
    no_layers = {"full_attention", "sliding_attention"}.difference(file.get("layer_types") or ())
    yield ()
    for key, value in file.items():
        if isinstance(value, dict) and value and key not in SILENT | no_layers:
            inside = mappings({"layer_types": file.get("layer_types")} | value)
            yield from ((key, *at) for at in inside)
