"""`workhorse train`: output, files and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tiny import RECIPE
from workhorse.checkpoints import RunDirectory
from workhorse.cli.main import main
from workhorse.cli.output import next_command
from workhorse.cli.train_progress import duration, show_training
from workhorse.devices.memory import size
from workhorse.train import read_metrics
from workhorse.train.recipe.training import OBJECTIVES
from workhorse.train.report.page import duration as in_words

pytestmark = pytest.mark.usefixtures("recipe")


def test_trains_and_tells(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe]) == 0
    said = capsys.readouterr()
    assert "runs/tiny: step 6 of 6" in said.out
    assert "bits per byte" in said.out
    following = next_command("generate", "runs/tiny", "--prompt", "TEXT")
    last = f"report runs/tiny/report.html; {following}"
    assert said.out.splitlines()[-1] == last
    lines = said.err.splitlines()
    assert any(line.startswith("step 2/6: loss 5.") for line in lines)
    assert any("left" in line and "of peak" in line for line in lines)
    assert Path("runs/tiny/report.html").exists()


def test_a_quantity_is_the_same_wherever_it_is_shown(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log, the progress, the end, `--json` and the report, of a run stopped after step 5."""
    arguments = ["train", recipe, "train.steps=5", "train.log_every=4", "train.eval_every=4"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert main([*arguments, "--out", "again", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    events = {event["kind"]: event for event in read_metrics(Path("again/metrics.jsonl"))}
    step, validation, end = events["step"], events["validation"], events["end"]
    assert result["figures"] == {"loss": validation["loss"]}
    assert result["bits_per_byte"] == validation["bits_per_byte"]
    assert result["loss"] == step["loss"]
    assert (result["step"], result["tokens"]) == (end["step"], end["tokens"])
    assert (result["tokens"], result["seconds"]) == (step["tokens"], end["seconds"])
    page = Path("again/report.html").read_text("utf-8")
    held_out = f"{validation['loss']:.4f}"
    bits = f"{validation['bits_per_byte']:.4f}"
    for text in (
        f"<b>{held_out}</b><span>validation loss, nats per token",
        f"<b>{bits}</b><span>validation bits per byte",
        "<b>5 of 5</b><span>steps",
        f"<b>{result['tokens']}</b><span>tokens trained on",
        f"<b>{in_words(result['seconds'])}</b><span>training time",
        f"<b>{size(end['peak_memory'][0])}</b><span>peak memory",
    ):
        assert text in page
    assert f"validation loss {held_out}, {bits} bits per byte\n" in said.out
    assert f"step 5: validation loss {held_out}, {bits} bits per byte\n" in said.err
    assert f"step 5/5: loss {step['loss']:.4f}, " in said.err
    assert re.search(rf"\n{result['tokens']} tokens in [0-9.]+ s, validation included\n", said.out)
    assert re.search(r"with a peak of [0-9.]+[GT] FLOP/s in matmuls", said.err)


STEP = {"kind": "step", "step": 5, "tokens": 20, "tokens_per_second": 2.0, "skipped_steps": 0}
STEP |= {"loss": 0.98765, "peak_fraction": 0.5, "kl": 2.31, "accuracy": 1.0, "margin": 9.3}
STEP |= {"reward": 0.71, "reward_gain": -0.052, "entropy": 1.3}
PAIRS = "loss 0.9877, margin 9.30, accuracy 1.00"
PROGRESS = {
    "next_token": "loss 0.9877",
    "dpo": PAIRS,
    "orpo": PAIRS,
    "simpo": PAIRS,
    "reward": PAIRS,
    "kto": "loss 0.9877, reward gain -0.052, accuracy 1.00, kl 2.31",
    "policy": "reward 0.71, kl 2.31, entropy 1.30",
    "distill": "loss 0.9877",
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_progress_line_has_the_figures_that_matter(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    headline = OBJECTIVES[kind].headline
    with show_training(10, headline) as show:
        show(STEP)
        show({**STEP, "kind": "validation", "whole": True, "bits_per_byte": None})
        show({**STEP, "tokens": 0, "tokens_per_second": 0.0})  # all completions are ignored
    before, held_out, after = capsys.readouterr().err.splitlines()
    assert before.startswith(f"step 5/10: {PROGRESS[kind]}, 2 tokens/s")
    assert held_out == f"step 5: validation {PROGRESS[kind]}"
    assert f"{PROGRESS[kind]}, 0 tokens/s" in after
    assert after.endswith("? left")


def test_a_run_of_conversations_can_chat(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}))
    corpus = "{kind: conversations, path: chats.jsonl, validation_fraction: 0}"
    settings = [f"data={{corpus: {corpus}}}", "tokenizer.chat=true"]
    assert main(["train", recipe, *settings]) == 0
    assert capsys.readouterr().out.endswith(f"; {next_command('chat', 'runs/tiny')}\n")


def test_preparations_are_told(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.cli.output.PLAIN_INTERVAL", 0.0)
    monkeypatch.setattr("workhorse.data.preparation.REPORT_BYTES", 1)
    assert main(["train", recipe, "tokenizer={kind: characters}"]) == 0
    first, second = capsys.readouterr().err.splitlines()[2:4]
    assert first == "training the tokenizer"
    assert second.startswith("tokenizing: ")
    assert main(["train", recipe, "--out", "bytes"]) == 0
    assert "tokenizer" not in capsys.readouterr().err


def test_unknown_characters_are_told_where_they_flatter(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "tokenizer={kind: characters, vocab_size: 9}"
    assert main(["train", recipe, few]) == 0
    said = capsys.readouterr()
    assert "are unknown: the model cannot learn their text, and they" in said.err
    assert "bits per byte (too low: " in said.err
    assert "bits per byte (too low: " in said.out
    page = Path("runs/tiny/report.html").read_text("utf-8")
    assert "unknown validation tokens: loss is too low" in page


def test_json_is_one_line_on_stdout(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--out", "run", "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert result["run_directory"] == "run"
    assert result["step"] == 6
    assert result["validation_loss"] > 0


def test_settings_and_flags_replace_the_recipes(recipe: str) -> None:
    arguments = ["train.steps=3", "model.d_model=32", "--dtype", "bfloat16", "--out", "run"]
    assert main(["train", recipe, *arguments]) == 0
    assert json.loads(Path("run/config.json").read_text())["d_model"] == 32
    saved = Path("run/recipe.yaml").read_text()
    assert "steps: 3" in saved
    assert "dtype: bfloat16" in saved


def test_resume_goes_on(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    constant = "train.schedule={kind: constant}"
    assert main(["train", recipe, constant]) == 0
    assert main(["train", recipe, constant, "train.steps=8", "--resume"]) == 0
    said = capsys.readouterr()
    assert "train.steps changes from 6 to 8" in said.err
    assert "resuming after step 6" in said.err
    events = read_metrics(Path("runs/tiny/metrics.jsonl"))
    assert [e["step"] for e in events if e["kind"] == "step"] == [2, 4, 6, 8]


def test_resuming_a_finished_run_says_how_to_go_on(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe]) == 0
    for arguments in (["--dry-run"], []):
        capsys.readouterr()
        assert main(["train", recipe, "--resume", *arguments]) == 0
        said = capsys.readouterr().err
        line = "runs/tiny is finished: all train.steps=6 are done; to continue, set more, "
        assert f"{line}for example train.steps=12\n" in said
        assert "after step" not in said
    assert main(["train", recipe, "--resume", "train.steps=12"]) == 0
    said = capsys.readouterr()
    assert "is finished" not in said.err
    assert "step 12 of 12" in said.out


def test_the_report_says_what_a_run_changed_of_the_recipe(recipe: str) -> None:
    Path(recipe).write_text("description: Reaches 1.5.\n" + RECIPE)
    settings = ["train.steps=3", "data.corpus={kind: text, path: corpus.txt}"]
    note = "this run differs from the recipe file and its description: "
    assert main(["train", recipe, *settings, "--dtype", "float32", "--out", "run"]) == 0
    page = Path("run/report.html").read_text("utf-8")
    assert f"{note}{', '.join([*settings, 'train.dtype=float32'])}</p>" in page
    assert main(["train", "run", "train.log_every=1", "--resume"]) == 0
    page = Path("run/report.html").read_text("utf-8")
    assert f"{note}train.steps=3, " in page  # changes by a resume are in the notes
    assert main(["train", recipe, "--out", "whole"]) == 0
    page = Path("whole/report.html").read_text("utf-8")
    assert "Reaches 1.5." in page
    assert "This run differs" not in page


def test_a_run_directory_is_its_own_recipe(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "train.log_every=3", "--out", "run"]) == 0
    assert main(["train", "run"]) == 2
    assert (
        "run is already a run; continue it with --resume, or start a new run"
        in capsys.readouterr().err
    )
    assert main(["train", "run", "train.steps=9", "--resume"]) == 0
    assert main(["train", "run", "--out", "other"]) == 0
    for out in ("run", "other"):
        steps = [e["step"] for e in read_metrics(Path(out, "metrics.jsonl")) if e["kind"] == "step"]
        assert steps == [3, 6, 9]


def test_flags_given_with_their_default_replace_the_recipes(recipe: str) -> None:
    settings = ["train.threads=1", "train.dtype=bfloat16", "train.device=cpu"]
    flags = ["--threads", "0", "--dtype", "auto", "--device", "auto"]
    assert main(["train", recipe, *settings, *flags, "--out", "run"]) == 0
    saved = Path("run/recipe.yaml").read_text()
    assert "threads: 0" in saved
    assert "dtype: auto" in saved
    assert "device: auto" in saved


def test_fewer_steps_shorten_the_warmup_of_the_file(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = RECIPE.replace("log_every: 2", "log_every: 2, schedule: {kind: wsd, warmup_steps: 4}")
    Path(recipe).write_text(warm)
    assert main(["train", recipe, "train.steps=3", "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert (
        "train.schedule.warmup_steps is shortened to 2, in proportion to train.steps=3: the recipe "
        "warms up for 4 of its "
    ) in said
    assert "warmup_steps: 2" in Path("run/recipe.yaml").read_text()
    assert main(["train", recipe, "train.steps=3", "train.schedule.warmup_steps=3"]) == 2


def test_another_kind_replaces_the_settings_of_the_first(recipe: str) -> None:
    muon = "log_every: 2, optimizer: {kind: muon, momentum: 0.9, learning_rate: 0.02}"
    Path(recipe).write_text(RECIPE.replace("log_every: 2", muon))
    settings = ["train.optimizer.eps=1e-7", "train.optimizer.kind=adamw"]
    assert main(["train", recipe, *settings, "--out", "run"]) == 0
    optimizer = RunDirectory("run").recipe()["train"]["optimizer"]
    assert (optimizer["kind"], optimizer["eps"]) == ("adamw", 1e-7)
    assert optimizer["learning_rate"] == 1e-3


def test_another_kind_tells_what_it_leaves_out(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    muon = "log_every: 2, optimizer: {kind: muon, momentum: 0.9, learning_rate: 0.02}"
    Path(recipe).write_text(RECIPE.replace("log_every: 2", muon))
    assert main(["train", recipe, "train.optimizer.kind=adamw", "--dry-run"]) == 0
    told = "train.optimizer.kind=adamw drops momentum=0.9, learning_rate=0.02 of kind muon\n"
    assert told in capsys.readouterr().err
    assert main(["data", "prepare", recipe, "train.optimizer.kind=adamw"]) == 0
    assert told in capsys.readouterr().err


def test_a_section_without_kind_is_of_the_default_kind(recipe: str) -> None:
    assert main(["train", recipe, "train.optimizer.learning_rate=0.5", "--out", "run"]) == 0
    optimizer = RunDirectory("run").recipe()["train"]["optimizer"]
    assert (optimizer["kind"], optimizer["learning_rate"]) == ("muon", 0.5)


def test_a_reader_that_has_seen_enough_ends_nothing(recipe: str) -> None:
    train = f"'{sys.executable}' -m workhorse train {recipe} train.log_every=1 --out run"
    shell = f"({train} 2>&1; echo $? > code) | head -n 1"
    subprocess.run(shell, shell=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert Path("code").read_text() == "0\n"
    assert RunDirectory("run").store().newest().step == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2"], "gpt2 is a preset, not a recipe; write a recipe with model: {preset: gpt2}, or"),
        (["nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory; check the path"),
        (["corpus.txt"], "corpus.txt: "),
        (["tiny.yaml", "steps=3"], "unknown key 'steps'; did you mean train.steps?"),
        (
            ["tiny.yaml", "model.blocks.main.feed_forward={kind:mlp,d_ff:64}"],
            "YAML parses 'kind:mlp' as one key without a value; add a space after the colon",
        ),
        (["tiny.yaml", "train.stepps=3"], "train: unknown key 'stepps'; did you mean 'steps'?"),
        (
            ["tiny.yaml", "train.steps=many"],
            "train.steps: 'many' is not a whole number; give one of 1 or more",
        ),
        (["tiny.yaml", "steps"], "'steps' is not a setting; write section.key=value"),
        (["tiny.yaml", "data.corpus.path=gone.txt"], "gone.txt"),
        (["tiny.yaml", "--out", "corpus.txt"], "it is a file"),
        (["."], ". is not a run: it has no recipe.yaml; give a recipe file"),
        (["tiny.yaml", "train.schedule.warmup_steps=9"], "to train.schedule.warmup_steps=0"),
        (["tiny.yaml", "--resume"], "contains no run to resume"),
        (["tiny.yaml", "--device", "gpu"], "device=gpu is not a device"),
        (["tiny.yaml", "train.seq_len=100000"], "seq_len + 1 = 100001"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]
    assert said.err.count("workhorse") == 1
    assert [path for path in sorted(Path().rglob("*")) if path.name != "runs"] == before


@pytest.mark.parametrize(
    ("file", "message"),
    [("gone.yaml", "cannot read gone.yaml"), ("corpus.txt", "corpus.txt: expected settings")],
)
def test_a_file_that_is_no_recipe_does_not_wait_for_torch(file: str, message: str) -> None:
    code = f"""
import sys
from workhorse.cli.main import main
assert main(["train", "{file}"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--steps", "10"],
            "no such option --steps; write the recipe's setting train.steps=10 (see",
        ),
        (["--batch-size=4"], "write the recipe's setting train.batch_size=4 (see"),
        (["--lr", "1"], "train.optimizer.learning_rate=1 or train.optimizer.adamw.learning_rate=1"),
        (
            ["--lr", "--resume"],
            "write the recipe's setting train.optimizer.learning_rate=... or tr",
        ),
        (["--zzz"], "No such option '--zzz'"),
        (["--show-recipe"], "--show-recipe only applies to --dry-run; remove it"),
    ],
)
def test_an_option_that_is_a_setting_is_told_as_one(
    recipe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_have_their_exit_codes(recipe: str, number: signal.Signals, code: int) -> None:
    arguments = ["train", recipe, "train.steps=100000", "train.log_every=1", "--out", "run"]
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores SIGHUP, which is inherited
    with subprocess.Popen(
        [sys.executable, "-m", "workhorse", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(number)
                break
        process.stderr.read()
        said = process.stdout.read()
    signal.signal(number, before)
    assert process.returncode == code
    assert f"stopped by {number.name} and saved" in said
    assert "resume with workhorse train run --resume" in said
    assert list(Path("run/checkpoints").glob("step-*/manifest.json"))


def test_a_terminal_gets_a_live_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    start = {
        "kind": "start",
        "step": 0,
        "steps": 10,
        "parameters": 9,
        "train_tokens": 90,
        "validation_tokens": 0,
        "device": "cpu",
    }
    with show_training(10) as show:
        show({"kind": "data", "step": 0, "done": 5, "total": 9})
        show({**start, "peak_flops": 1e9})
        show(
            {
                "kind": "step",
                "step": 5,
                "loss": 1.25,
                "tokens": 20,
                "tokens_per_second": 2.0,
                "peak_fraction": 0.5,
                "skipped_steps": 1,
            }
        )
        show({"kind": "samples", "step": 5, "samples": [{"prompt": "[b]", "text": "x"}]})
    said = capsys.readouterr().err
    assert "loss 1.2500" in said
    assert "0:10 left" in said
    assert "1 skipped" in said
    assert "[b]|x" in said  # samples are shown unchanged, not as markup


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "0:05"), (65.4, "1:05"), (3725, "1:02:05"), (float("inf"), "?")]
)
def test_clock(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_help_tells_what_applies_where_a_flag_is_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("[default: (the recipe's)") == len(("device", "dtype", "threads"))
    assert "default: auto" not in said
    assert main(["generate", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "lets torch decide. [default: 0" in said
    assert "recipe's" not in said


def test_processes_that_are_started_again_go_on_with_their_own_run_alone(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "train.steps=2"]) == 0
    run = RunDirectory(Path("runs/tiny"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    os.utime(run.recipe_file, (1, 1))  # a run from before this launch
    before = run.metrics_file.read_bytes()
    capsys.readouterr()
    assert main(["train", recipe]) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert run.metrics_file.read_bytes() == before
    os.utime(run.recipe_file)  # a run of an earlier attempt
    assert main(["train", recipe]) == 0
    assert [one["step"] for one in read_metrics(run.metrics_file) if one["kind"] == "step"][-1] == 6
