"""Scores in the lm-evaluation-harness equal the scores of its `hf` model."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # its `hf` model needs it

import datasets
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.evaluate.local_tasks import WORDS, write_tasks
from tests.evaluate.small_models import CONTEXT, write_model
from workhorse.errors import WorkhorseError
from workhorse.evaluate import load_tasks
from workhorse.evaluate.harness_model import HarnessModel
from workhorse.model.load import load

TASKS = ("choices", "letters", "continue", "prose")


@pytest.fixture(scope="module", autouse=True)
def _prepared_here(tmp_path_factory):
    """Use a temporary cache folder for data sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, tmp_path_factory) -> Path:
    """A model without a bos token before documents, and one with it."""
    name = request.param
    return write_model(tmp_path_factory.mktemp(name), name, begins=name == "llama")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama", begins=True)


def ours(folder: Path, **options: Any) -> HarnessModel:
    return HarnessModel(load(folder, device="cpu"), **options)


def theirs(folder: Path, batch_size: int) -> HFLM:
    return HFLM(str(folder), device="cpu", batch_size=batch_size, dtype="float32")


def results(lm: HarnessModel, tasks: Path, **options: Any) -> dict[str, Any]:
    return load_tasks(TASKS, tasks).run(lm, samples=True, **options)


def references(lm: HFLM, tasks: Path, **options: Any) -> dict[str, Any]:
    """Run the tasks on the harness's own model."""
    manager = TaskManager(include_path=tasks, include_defaults=False)
    return simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, **options)


def answers(found: dict[str, Any], task: str) -> list[Any]:
    """Return the model's response to each request, before the task's filters."""
    return [
        reply for sample in found["samples"][task] for some in sample["resps"] for reply in some
    ]


def metrics(found: dict[str, Any], task: str) -> dict[str, float]:
    return {key: value for key, value in found["results"][task].items() if "," in key}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for task in ("choices", "letters", "continue"):
        assert metrics(found, task) == metrics(expected, task)
    for task in ("choices", "letters"):
        for ours, theirs in zip(answers(found, task), answers(expected, task), strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
            assert ours[1] == theirs[1]
    assert answers(found, "continue") == answers(expected, "continue")
    prose = zip(answers(found, "prose"), answers(expected, "prose"), strict=True)
    assert all(ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in prose)
    assert metrics(found, "prose")["word_perplexity,none"] == pytest.approx(
        metrics(expected, "prose")["word_perplexity,none"], rel=1e-6
    )


@pytest.mark.parametrize("batch_size", [1, 8])
def test_the_scores_are_those_of_the_hf_model(folder, tasks, batch_size):
    expected = references(theirs(folder, batch_size), tasks)
    model = ours(folder, batch_size=batch_size)
    found = results(model, tasks)
    assert_same(found, expected)
    # The comparison is meaningful: right and wrong, different and truncated requests.
    assert 0.2 < found["results"]["choices"]["acc,none"] < 0.8
    assert 0.0 < found["results"]["continue"]["exact_match,letter"] < 0.8
    assert len(set(answers(found, "continue"))) > 20
    assert found["config"]["shortened_requests"] == model.shortened > 50


def test_chats_and_examples_are_those_of_the_hf_model(folder, tasks):
    found = results(ours(folder), tasks, chat=True, fewshot=1, limit=12)
    options = {"apply_chat_template": True, "num_fewshot": 1, "limit": 12}
    assert_same(found, references(theirs(folder, 8), tasks, **options))


def test_more_examples_than_there_are(folder, tasks):
    with pytest.raises(WorkhorseError, match=r"task 'prose' has fewer than 13 examples"):
        results(ours(folder), tasks, fewshot=13)
    results(ours(folder), tasks, fewshot=12, limit=1)


@pytest.mark.parametrize("last", ["so far", "so far ", " <end> so far"])
def test_a_chat_whose_last_message_goes_on(folder, last):
    messages = [{"role": "user", "content": "so far?"}, {"role": "assistant", "content": last}]
    text = ours(folder).apply_chat_template(messages, add_generation_prompt=False)
    assert text == theirs(folder, 1).apply_chat_template(messages, add_generation_prompt=False)
    assert text.endswith(last)


def test_a_limit_above_all_numbers_of_documents_means_all(llama, tasks):
    assert_same(results(ours(llama), tasks, limit=2**63), results(ours(llama), tasks))


def test_without_a_batch_size_the_scores_are_the_same(llama, tasks):
    """The batch size is chosen for the device; `max_length` shortens the context."""
    some = {"limit": 8}
    shorter = HFLM(str(llama), device="cpu", batch_size=8, max_length=20)
    model = ours(llama, max_length=20)
    assert_same(results(model, tasks, **some), references(shorter, tasks, **some))


def test_local_files_ask_nothing_of_a_network(tasks, monkeypatch):
    """No network is used, even without the offline settings."""
    attempts = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr("datasets.load.get_session", lambda: attempts.append("session"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **_: attempts.append(place))
    assert set(load_tasks(TASKS, tasks).loaded["tasks"]) == set(TASKS)
    assert attempts == []


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, some, number) for number, some in enumerate(arguments)]


def test_requests_that_read_the_same_are_read_once(llama, monkeypatch):
    model = ours(llama, batch_size=100)
    rows = []
    hidden = model._model.decoder.hidden
    monkeypatch.setattr(
        model._model.decoder,
        "hidden",
        lambda x, **given: rows.append(x.shape) or hidden(x, **given),
    )
    words = (" the", " a")
    assert all(len(model.tokenizer.encode(word)) == 1 for word in words)
    asked = requests("loglikelihood", *(("the cat sees", word) for word in words * 2))
    found = model.loglikelihood(asked)
    assert [shape[0] for shape in rows] == [1]
    assert found[0] == found[2] != found[1] == found[3]


def test_greedy_continuations_are_known(llama):
    """Completions of greedy decoding are greedy; other continuations are not."""
    model, reference = ours(llama), theirs(llama, 8)
    contexts = [f"{first} {second}" for first in WORDS[:6] for second in WORDS[:6]]
    options = {"max_gen_toks": 2, "until": ["\ufffd"]}
    said = model.generate_until(requests("g", *((context, options) for context in contexts)))
    pairs = [*zip(contexts, said, strict=True), *((context, " the") for context in contexts)]
    asked = requests("l", *(pair for pair in pairs if pair[1]))
    flags = [is_greedy for _, is_greedy in model.loglikelihood(asked)]
    assert flags == [is_greedy for _, is_greedy in reference.loglikelihood(asked)]
    assert True in flags
    assert False in flags


def test_partial_results_are_kept_as_they_come(llama):
    kept = {}

    class Hook:
        def add_partial(self, kind: str, arguments: Any, result: Any) -> None:
            kept[kind, json.dumps(arguments)] = result

    model = ours(llama)
    model.set_cache_hook(Hook())
    pair, text, prompt = ("the cat", " sees"), ("the old dog",), ("the", {"max_gen_toks": 3})
    expected = {
        ("loglikelihood", json.dumps(pair)): model.loglikelihood(requests("l", pair))[0],
        ("loglikelihood_rolling", json.dumps(text)): model.loglikelihood_rolling(
            requests("r", text)
        )[0],
        ("generate_until", json.dumps(prompt)): model.generate_until(requests("g", prompt))[0],
    }
    assert kept == expected


def test_drawn_answers_differ_and_come_again_with_the_seed(llama):
    model = ours(llama)
    options = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8}
    asked = requests("g", *[("the cat", options)] * 4, ("the dog", options))
    torch.manual_seed(3)
    first = model.generate_until(asked)
    assert len(set(first)) == 5
    torch.manual_seed(3)
    assert model.generate_until(asked) == first
    assert model.generate_until(asked) != first


def test_the_name_of_a_special_token_ends_an_answer(llama):
    """The completion contains the tokens before the special token, but not its name."""
    model = ours(llama)
    tokens = model._model.generate("the cat", temperature=0, max_new_tokens=8).tokens
    role = model.tokenizer.token_id("<role>")
    weight = model._model.decoder.head.proj.weight
    with torch.no_grad():  # swap the weights: <role> becomes the third token
        weight[[tokens[2], role]] = weight[[role, tokens[2]]]
    assert tokens[2] not in tokens[:2]
    stopped = requests("g", ("the cat", {"max_gen_toks": 8, "until": ["<role>"]}))
    assert model.generate_until(stopped) == [model.tokenizer.decode(tokens[:2])]


def test_any_of_the_tokens_that_end_a_models_texts_ends_an_answer(llama):
    """The token need not be special; it is not part of the completion."""
    loaded = load(llama)
    tokens = loaded.generate("the cat", temperature=0, max_new_tokens=8).tokens
    assert tokens[2] not in tokens[:2]
    model = HarnessModel(replace(loaded, stop_tokens=(tokens[2],)))
    said = model.generate_until(requests("g", ("the cat", {"max_gen_toks": 8})))
    assert said == [model.tokenizer.decode(tokens[:2])]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("generate_until", ("a", {"max_gen_toks": CONTEXT}), f"max_gen_toks={CONTEXT} leaves no"),
        (
            "generate_until",
            ("a", {"max_gen_toks": 4, "topk": 3}),
            "unknown option 'topk' in generation_kwargs; did",
        ),
        ("loglikelihood", ("a", " the" * 50), "a continuation has 50 tokens, more .* of 40"),
        ("loglikelihood", ("a", ""), "an empty context or continuation"),
    ],
)
def test_requests_that_cannot_be_answered(llama, kind, arguments, message):
    with pytest.raises(WorkhorseError, match=message):
        getattr(ours(llama), kind)(requests(kind, arguments))


def test_a_context_that_cannot_be(llama):
    with pytest.raises(WorkhorseError, match=f"max_length=41 is not valid; choose 1 to {CONTEXT}"):
        ours(llama, max_length=41)


def test_a_run_of_ours_begins_texts_as_it_learned_to(run_folder):
    """The run has no bos: no prefix is added, and an empty context is the eos before a document."""
    model = HarnessModel(load(run_folder))
    eos = model.tokenizer.eos_id
    assert model.prefix_token_id == model.eot_token_id == eos
    assert model.tok_encode("ab") == [97, 98]
    assert model.tok_encode("a<|eos|>") == [97, eos]
    decoder = model._model.decoder
    logprobs = decoder(torch.tensor([[eos, 97, 98]])).log_softmax(-1)[0]
    expected = (logprobs[0, 97] + logprobs[1, 98]).item()
    ((found, _),) = model.loglikelihood(requests("l", ("", "ab")))
    assert found == pytest.approx(expected, abs=1e-6)
    assert model.loglikelihood_rolling(requests("r", ("ab",))) == [pytest.approx(expected)]
    with pytest.raises(WorkhorseError, match="has no chat template; evaluate it without chat"):
        model.apply_chat_template([{"role": "user", "content": "a"}])
