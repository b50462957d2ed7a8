"""Files written before transformers 5, as most published ones are: other keys, the same model.

What such a file leaves out, or calls by an older name, must mean to us what it means to
transformers, and no key of it may go unread.
"""

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.parity.all_cases import ALL
from tests.parity.reference import quiet, their_config
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import Fields, family
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.models.huggingface.rotation import contradictions

FILES: dict[str, dict[str, Any]] = {}
for _path in sorted(Path(__file__).with_name("older").glob("*.py")):
    FILES |= importlib.import_module(f"tests.parity.older.{_path.stem}").FILES
READ_ONLY = {"mpt-7b-storywriter"}
"""Where transformers does not compute what the file says: ALiBi's slopes in MPT."""


@pytest.mark.parametrize("name", FILES)
def test_an_older_file_means_what_transformers_reads_in_it(name: str) -> None:
    file = FILES[name]
    with quiet(), torch.device("meta"):
        theirs = hf.AutoConfig.for_model(**deepcopy(file))  # it writes into mappings
        model = hf.AutoModelForCausalLM.from_config(theirs)
    reader = family(file["model_type"])
    fields = Fields(file)
    ours = reader.read(fields)
    assert fields.unused() == []
    parsed = reader.read(Fields(theirs.to_dict()))
    assert list(compare_plain(plain(ours), plain(parsed))) == []
    assert (reader.difference(ours) is None) == (name not in READ_ONLY)
    assert n_parameters(ours.build(device="meta")) == n_parameters(model)


def n_parameters(model: nn.Module) -> int:
    """Those that gradients train: what balances experts is a buffer there in some families."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("model_type", ALL)
def test_rope_scaling_beside_rope_parameters_means_what_it_means_there(model_type: str) -> None:
    """As when somebody adds a scaling by hand to a file of transformers 5."""
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
        pytest.skip(f"no such model here: {error}")
    ours = family(model_type).read(Fields(file))
    assert list(compare_plain(plain(ours), plain(expected))) == []
    assert "rope_scaling differs from rope_parameters; rope_scaling counts" in contradictions(file)
