import gzip
import json
import math
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.evaluate.local_tasks import write_task
from workhorse.checkpoints.huggingface.export import find_family
from workhorse.checkpoints.peft import write_peft
from workhorse.cli.main import main
from workhorse.model.load import load
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig


def evaluate(capsys, *arguments: str) -> dict:
    assert main(["evaluate", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert "decode: " in printed.err  # how the model was executed
    return json.loads(printed.out)


def test_a_folder(run_folder, capsys):
    result = evaluate(capsys, str(run_folder), "--data", str(run_folder.parent / "texts"))
    assert result["bytes"] == result["tokens"] == 3 * 63
    assert result["documents"] == 3
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))


def test_a_file_is_evaluated_whole(run_folder, capsys):
    result = evaluate(capsys, str(run_folder), "--data", str(run_folder.parent / "texts/a.txt"))
    assert (result["tokens"], result["documents"]) == (63, 1)


def test_jsonl_is_read_as_such(run_folder, capsys, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "abc"}\n{"text": "defg"}\n'))
    result = evaluate(capsys, str(run_folder), "--data", str(path))
    assert (result["tokens"], result["documents"]) == (7, 2)


def test_without_data_it_is_the_validation_split_of_the_run(run_folder, capsys):
    folder = str(run_folder.parent / "texts")
    expected = evaluate(capsys, str(run_folder), "--data", folder)
    assert evaluate(capsys, str(run_folder)) == expected


def test_a_run_that_holds_nothing_out_is_told_to_name_a_text(run_folder, capsys):
    recipe = run_folder / "recipe.yaml"
    written = yaml.safe_load(recipe.read_text())
    held_out = written["data"]["corpus"].pop("validation")
    written["data"]["corpus"]["validation_fraction"] = 0
    recipe.write_text(yaml.safe_dump(written))
    assert_refused(
        capsys,
        [str(run_folder)],
        f"{run_folder} has no validation split; give the text with --data FILE",
    )
    assert evaluate(capsys, str(run_folder), "--data", held_out)["documents"] == 3


def test_one_document_is_said_so(run_folder, capsys):
    assert (
        main(["evaluate", str(run_folder), "--data", str(run_folder.parent / "texts/a.txt")]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == "over 63 tokens, 63 bytes, 1 document"


def test_stride_and_batch_size(run_folder, capsys):
    plain = evaluate(capsys, str(run_folder))
    overlapping = evaluate(capsys, str(run_folder), "--stride", "8", "--batch-size", "2")
    assert overlapping["tokens"] == plain["tokens"]
    assert overlapping["loss"] != plain["loss"]


def test_compressors_beside_it(run_folder, capsys):
    folder = run_folder.parent / "texts"
    result = evaluate(capsys, str(run_folder), "--compare-gzip")
    joined = b"".join((folder / f"{name}.txt").read_bytes() for name in "abc")
    assert result["compressors"]["gzip"] == 8 * len(gzip.compress(joined, 9)) / len(joined)
    assert main(["evaluate", str(run_folder), "--compare-gzip"]) == 0
    out, _ = capsys.readouterr()
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:5])
    assert float(lines["  gzip -9"]) == pytest.approx(result["compressors"]["gzip"], abs=1e-4)
    assert float(lines["bits per byte"]) == pytest.approx(result["bits_per_byte"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.txt"], "missing.txt"),
        (["--data", "empty.txt"], "the documents are too short: 0 bytes have no token"),
        (["--data", "latin.txt"], "is not UTF-8; convert the file to UTF-8\n"),
        (["--stride", "33"], "stride=33 is not within the context; choose 1 to 32"),
    ],
)
def test_wrong_usage_is_one_line(run_folder, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(run_folder.parent)
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    assert main(["evaluate", str(run_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "a", "--data", "-"], "--data conflicts with --tasks; remove it"),
        (["--tasks", "a", "--stride", "3"], "--stride only applies to --data; remove it"),
        (["--tasks", "a", "--compare-gzip"], "--compare-gzip only applies to --data; remove it"),
        (["--limit", "3"], "--limit only applies to --tasks or --reward; remove it"),
        (["--beside", "gpt2"], "--beside only applies to --reward; remove it"),
        (["--reward", "a.py:f", "--stride", "3"], "--stride only applies to --data; remove it"),
        (["--reward", "a.py:f", "--tasks", "a"], "--reward conflicts with --tasks; remove it"),
        (["--fewshot", "0"], "--fewshot only applies to --tasks; remove it"),
        (["--include-path", "."], "--include-path only applies to --tasks; remove it"),
        (["--apply-chat-template"], "--apply-chat-template only applies to --tasks; remove it"),
    ],
)
def test_a_flag_without_effect_is_refused(run_folder, capsys, arguments, message):
    assert_refused(capsys, [str(run_folder), *arguments], message)


@pytest.fixture
def questions(tmp_path):
    """Flags for four questions and two rewards."""
    turn = '{{"role": "{}", "content": "{}"}}'
    lines = [
        f'{{"messages": [{turn.format("user", n)}, {turn.format("assistant", "b")}]}}\n'
        for n in range(4)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    (tmp_path / "rewards.py").write_text(
        "def one(prompts, completions, answers):\n    return [1 for _ in prompts]\n"
        "def prompt(prompts, completions, answers):\n"
        "    return [int(prompt) * (answer == 'b') for prompt, answer in zip(prompts, answers)]\n"
    )
    rewards = [f"{tmp_path / 'rewards.py'}:{name}" for name in ("one", "prompt")]
    return ["--data", str(tmp_path / "chats.jsonl"), "--reward", rewards[0], "--reward", rewards[1]]


def test_rewards_of_two_models(run_folder, capsys, questions):
    beside = ["--beside", str(shutil.copytree(run_folder, run_folder.with_name("other")))]
    result = evaluate(capsys, str(run_folder), *questions, *beside)
    assert [*result] == [str(run_folder), beside[1]]
    first, second = result.values()
    assert first == second  # the same weights
    scores = first["scores"]
    assert [scores[questions[at]] for at in (3, 5)] == [1, (0 + 1 + 2 + 3) / 4]
    assert [one["question"]["known"] for one in first["answers"]] == ["b"] * 4
    assert (
        len(
            evaluate(capsys, str(run_folder), *questions, "--limit", "2")[str(run_folder)][
                "answers"
            ]
        )
        == 2
    )

    assert main(["evaluate", str(run_folder), *questions, *beside]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"{run_folder}  +ended [01].\d+  one 1.000  prompt 1.500  right 0.\d+", lines[0]
    )
    assert lines[1].startswith(f"{beside[1]}  ")
    assert lines[3] == "0 b"  # a question, its answer, and what the models answer
    assert [line.split()[0] for line in lines[4:6]] == [str(run_folder), beside[1]]


def test_an_adapter_belongs_to_the_first_model_only(run_folder, tmp_path, capsys, questions):
    base, adapter = str(run_folder), str(tmp_path / "adapter")
    decoder = load(base, execution="reference").decoder
    add_adapter(decoder, LoraConfig(rank=2))
    for weight in adapter_parameters(decoder).values():
        weight.data.normal_()
    write_peft(tmp_path / "adapter", decoder, find_family(decoder.config), base)
    alone = evaluate(capsys, base, *questions)
    found = evaluate(capsys, base, *questions, "--adapter", adapter, "--beside", base)
    assert [*found] == [f"{base} + {adapter}", base]
    assert found[base] == alone[base]
    assert found[f"{base} + {adapter}"]["answers"] != found[base]["answers"]


def test_a_reward_that_does_not_exist(run_folder, capsys, questions, monkeypatch):
    def answered(*_: object, **__: object) -> None:
        raise AssertionError("questions were answered before the reward was imported")

    monkeypatch.setattr("workhorse.evaluate.answers.answer_questions", answered)
    missing = "rewards.py:two raised AttributeError"
    assert_refused(
        capsys, [str(run_folder), *questions, "--reward", f"{questions[3][:-4]}:two"], missing
    )
    assert_refused(
        capsys, [str(run_folder), *questions, "--reward", "no.py:f"], "raised FileNotFoundError"
    )
    assert_refused(
        capsys, [str(run_folder), *questions[2:]], "no question with a known answer is left"
    )


def test_tasks_without_the_harness(run_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    expected = "tasks need the package lm-eval"
    assert_refused(capsys, [str(run_folder), "--tasks", "a"], expected, "'.[eval]'")


class TestTasks:
    """Tasks in a folder. The scores themselves are tested in `tests/evaluate`."""

    pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")

    @pytest.fixture(autouse=True)
    def _prepared_here(self, tmp_path, monkeypatch):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        folder = tmp_path / "tasks"
        rows = [{"text": f"text {i}", "options": ["a", "b"], "answer": i % 2} for i in range(9)]
        asked = {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
        several = {**asked, "doc_to_choice": "{{options}}"}
        write_task(folder, "which", rows, output_type="multiple_choice", **several)
        rows[0]["text"] *= 9  # longer than the context
        options = {"generation_kwargs": {"max_gen_toks": 4, "until": ["\n"]}}
        write_task(folder, "what", rows, output_type="generate_until", **asked, **options)
        return folder

    def test_as_json(self, run_folder, folder, capsys):
        paths = [str(run_folder), "--include-path", str(folder)]
        result = evaluate(capsys, *paths, "--tasks", "which,what", "--limit", "6", "--fewshot", "1")
        assert set(result["results"]) == {"which", "what"}
        assert 0 <= result["results"]["which"]["acc,none"] <= 1
        assert result["n-samples"]["which"] == {"original": 9, "effective": 6}
        assert result["n-shot"] == {"which": 1, "what": 1}
        assert result["versions"]["what"] == 1.0
        assert result["configs"]["what"]["generation_kwargs"]["max_gen_toks"] == 4
        assert result["config"]["model_name"] == str(run_folder)
        assert "samples" not in result

    def test_for_a_person(self, run_folder, folder, capsys):
        arguments = [str(run_folder), "--tasks", "what,which", "--include-path", str(folder)]
        assert main(["evaluate", *arguments, "--batch-size", "2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
        filled = [row for row in rows if len(row) == 7]
        assert [row[0] for row in filled if row[0]] == ["what", "which"]
        (accuracy,) = (row for row in filled if row[:5] == ["which", "1.0", "0", "none", "acc"])
        assert 0 <= float(accuracy[5]) <= 1
        assert lines[-1] == "1 request longer than the context, cut at the start"

    def test_an_unknown_task(self, run_folder, folder, capsys, monkeypatch):
        from lm_eval.tasks import TaskManager

        class Own(TaskManager):  # indexing all tasks takes seconds
            def __init__(self, include_path=None, include_defaults=True):
                super().__init__(include_path=include_path, include_defaults=False)

        monkeypatch.setattr("lm_eval.tasks.TaskManager", Own)
        arguments = [str(run_folder), "--include-path", str(folder)]
        expected = "there is no task 'whihc'; did you mean 'which'"
        assert_refused(capsys, [*arguments, "--tasks", "wh*,whihc"], expected)
        assert_refused(capsys, [str(run_folder), "--tasks", "what"], "there is no task 'what'; ")

    def test_a_name_that_no_file_has_is_refused_before_the_harness_is_imported(
        self, run_folder, capsys, monkeypatch
    ):
        def refuse():
            raise AssertionError("imported")

        monkeypatch.setattr("workhorse.evaluate.tasks._check_installed", refuse)
        expected = "there is no task 'helaswag'; did you mean 'hellaswag' or "
        assert_refused(capsys, ["no-model", "--tasks", "helaswag"], expected)
        expected = "there is no task 'nosuchtask'; lm-eval ls tasks lists them\n"
        assert_refused(capsys, ["no-model", "--tasks", "mmlu_*,nosuchtask"], expected)

    def test_data_that_would_have_to_be_fetched(self, run_folder, folder, capsys):
        (folder / "far.yaml").write_text(
            "task: far\ndataset_path: some/where\ntest_split: test\n"
            "output_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\n"
        )
        arguments = [str(run_folder), "--include-path", str(folder), "--tasks", "far"]
        expected = "task 'far' needs data that is not on this machine: Couldn't reach 'some/where'"
        assert_refused(capsys, arguments, expected, "or give a task from local files")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--include-path", "nowhere"], "nowhere is not a folder; give one with YAML"),
            (["--limit", "0"], "limit=0 is not positive; choose more than 0"),
            (["--fewshot", "-1"], "fewshot=-1 is negative; choose 0 or more examples"),
            (["--apply-chat-template"], "has no chat template; evaluate it without chat"),
        ],
    )
    def test_wrong_usage(self, run_folder, folder, capsys, arguments, message):
        paths = [str(run_folder), "--include-path", str(folder), "--tasks", "which"]
        assert_refused(capsys, [*paths, *arguments], message)

    def test_a_task_that_cannot_be_loaded(self, run_folder, folder, capsys):
        (folder / "which.jsonl").unlink()
        paths = [str(run_folder), "--include-path", str(folder), "--tasks", "which"]
        assert_refused(capsys, paths, "task 'which' cannot be loaded: Unable to find")


def assert_refused(capsys, arguments: list[str], *messages: str) -> None:
    assert main(["evaluate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for message in messages:
        assert message in err
