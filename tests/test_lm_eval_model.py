"""The model type `workhorse` of the harness: how it is found, and what its arguments mean."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.registry import get_model, model_registry

from workhorse.errors import WorkhorseError
from workhorse.lm_eval_model import WorkhorseLM

SOURCES = Path(__file__).parents[1] / "src"


def test_the_harness_finds_it_when_it_looks_for_models():
    """In a fresh process: the line that Python runs at the start, and then the harness."""
    line = (SOURCES / "workhorse_lm_eval.pth").read_text()
    program = f"""
import sys
sys.path.insert(0, {str(SOURCES)!r})
before = set(sys.modules)
{line}
{line}
assert set(sys.modules) - before == {{"workhorse_lm_eval"}}, set(sys.modules) - before
from lm_eval.api.registry import model_registry
import lm_eval.models
assert "torch" not in sys.modules and "workhorse" not in sys.modules
print(model_registry._objs["workhorse"], lm_eval.models.MODEL_MAPPING["hf"])
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": ":".join(path for path in sys.path if "site-packages" in path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "workhorse.lm_eval_model:WorkhorseLM",
        "lm_eval.models.huggingface:HFLM",
    ]


def test_the_arguments_that_the_harness_passes(run_folder):
    assert get_model("workhorse") is WorkhorseLM
    assert "hf" in model_registry
    given = {"batch_size": "auto:4", "max_batch_size": 64, "device": "cuda:0"}
    model = WorkhorseLM.create_from_arg_string(
        f"pretrained={run_folder},max_length=20,dtype=bfloat16", given
    )
    assert (model.batch_size, model.max_length) == (None, 20)
    info = model.get_model_info()
    assert info["model_name"] == str(run_folder)
    assert info["model_dtype"] == "torch.bfloat16"
    other = WorkhorseLM.create_from_arg_obj({"pretrained": str(run_folder)}, {"batch_size": "8"})
    assert (other.batch_size, other.max_length) == (8, 32)


def test_a_batch_size_that_is_none(run_folder):
    with pytest.raises(WorkhorseError, match="batch_size=none is no number of texts; choose 1 or"):
        WorkhorseLM(str(run_folder), batch_size="none")
