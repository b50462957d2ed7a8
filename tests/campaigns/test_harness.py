"""Campaign: the command, the harness and the server agree, without a network, on more documents."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.evaluate.local_tasks import write_tasks
from tests.serve.conftest import KEY, serving

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval"),
]

SIMPLE_EVALUATE = """
import json, sys
import lm_eval, workhorse
from lm_eval.tasks import TaskManager
from workhorse.evaluate.harness_model import HarnessModel
run, tasks, *names = sys.argv[1:]
manager = TaskManager(include_path=tasks)
model = HarnessModel(workhorse.load(run))
found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager)
print(json.dumps(found["results"]))
"""
SENTINEL = """
import os, socket
def refuse(*_):
    open(os.environ["REACHED"], "a").write("reached\\n")
    raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refuse
"""
"""Code that Python runs at its start: it records every attempt to reach a network."""


@pytest.mark.parametrize("offline", [{}, {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}])
def test_the_harness_and_the_command_agree_and_ask_no_network(run_folder, tmp_path, offline):
    tasks = write_tasks(tmp_path / "tasks", n=12)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SENTINEL)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {
        **kept,
        **offline,
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "PYTHONPATH": str(tmp_path / "site"),
        "REACHED": str(tmp_path / "reached"),
    }

    def run(*command: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            env={**environment, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    names = "choices,continue,prose"
    theirs = json.loads(run("-c", SIMPLE_EVALUATE, str(run_folder), str(tasks), *names.split(",")))
    arguments = [str(run_folder), "--include-path", str(tasks), "--tasks", names, "--json"]
    ours = json.loads(
        run("-m", "workhorse", "evaluate", *arguments, HF_UPDATE_DOWNLOAD_COUNTS="1")
    )["results"]
    assert not (tmp_path / "reached").exists()
    for task in names.split(","):
        for key, value in theirs[task].items():
            same = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert ours[task][key] == same


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_more_texts_and_batches(model_type, tmp_path, monkeypatch):
    import datasets

    from tests.evaluate.small_models import write_model
    from tests.evaluate.test_harness import assert_same, ours, references, results, theirs

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    tasks = write_tasks(tmp_path / "tasks", n=400)
    folder = write_model(tmp_path / "model", model_type, begins=model_type == "llama")
    expected = references(theirs(Path(folder), 4), tasks)
    for batch_size in (1, 3, 8, 64, None):
        assert_same(results(ours(folder, batch_size=batch_size), tasks), expected)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gpt2", {"tokenizer_backend": "huggingface"}),
        ("gpt2", {"tokenizer_backend": "remote", "auth_token": KEY, "batch_size": 8}),
        ("llama", {"tokenizer_backend": "huggingface", "add_bos_token": True, "batch_size": 8}),
        ("llama", {"tokenizer_backend": "huggingface", "add_bos_token": True, "num_concurrent": 4}),
    ],
    ids=str,
)
def test_the_server_gives_the_same_scores(model_type, options, tmp_path, monkeypatch):
    pytest.importorskip("tenacity", reason="lm-eval's client needs it")
    import datasets
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tests.evaluate.small_models import CONTEXT, write_model
    from tests.evaluate.test_harness import answers, metrics, ours, references, results

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    tasks = write_tasks(tmp_path / "tasks", n=60)
    folder = write_model(tmp_path / "model", model_type, begins=model_type == "llama")
    if options["tokenizer_backend"] == "huggingface":
        options = {**options, "tokenizer": str(folder)}
    with serving(folder, "--dtype", "float32") as url:
        client = LocalCompletionsAPI(
            model="model", base_url=f"{url}/completions", max_length=CONTEXT + 1, **options
        )
        theirs = references(client, tasks)
    # The client's scored sequences have one token less than the context, others have all.
    scored = results(ours(folder, max_length=CONTEXT - 1), tasks)
    for task in ("choices", "letters", "prose"):
        expected, found = answers(scored, task), answers(theirs, task)
        assert found == [pytest.approx(one, abs=1e-4) for one in expected]
        for name, value in metrics(scored, task).items():
            same = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert metrics(theirs, task)[name] == same
    generated = results(ours(folder, max_length=CONTEXT), tasks)
    assert answers(theirs, "continue") == answers(generated, "continue")
