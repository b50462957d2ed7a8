"""The recipes in `recipes/`, and the scripts beside them."""

import argparse
import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.config.base import read_yaml
from workhorse.data import Batch
from workhorse.nn import Decoder
from workhorse.optim.groups import build_optimizer
from workhorse.train import Recipe
from workhorse.train.recipe.recipe import written_over

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_read_and_says_what_it_reached(file):
    fields = read_yaml(file)
    base = fields
    while "init" in base:  # the run of another recipe
        base = read_yaml(file.with_name(f"{Path(base['init']).name}.yaml"))
    if base is not fields:
        model = {**base["model"], "vocab_size": 4096, "max_seq_len": base["train"]["seq_len"]}
        fields = written_over(fields, model, base["tokenizer"])
    recipe = Recipe.from_dict(fields)
    assert recipe.name == file.stem
    assert re.search(r"\d", recipe.description), "no measured result"


class PlainLayer(nn.Module):
    """A layer of `recipes/nanogpt.yaml` or of `recipes/decoder-2017.yaml`, in plain PyTorch."""

    def __init__(self, post_norm: bool, width: int, heads: int) -> None:
        super().__init__()
        self.post_norm, self.heads = post_norm, heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=post_norm)
        self.down = nn.Linear(4 * width, width, bias=post_norm)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=post_norm) for _ in range(2))

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.mT / (width // self.heads) ** 0.5
        later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        return self.down((F.relu if self.post_norm else F.gelu)(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.post_norm:
            x = first(x + self.attend(x))
            return second(x + self.feed(x))
        x = x + self.attend(first(x))
        return x + self.feed(second(x))


class PlainModel(nn.Module):
    """The whole model of one of the two recipes, with the weights of our decoder."""

    def __init__(self, ours: Decoder, post_norm: bool, heads: int = 4) -> None:
        super().__init__()
        state, width = ours.state_dict(), ours.config.d_model
        self.post_norm = post_norm
        self.tokens = nn.Parameter(state["embedding.tokens.weight"].clone())
        self.places = nn.Parameter(state.get("embedding.positions.table.weight", torch.zeros(0)))
        self.layers = nn.ModuleList(
            PlainLayer(post_norm, width, heads) for _ in range(ours.config.n_layers)
        )
        self.norm = nn.Identity() if post_norm else nn.LayerNorm(width, bias=False)
        if not post_norm:
            self.norm.load_state_dict({"weight": state["final_norm.weight"]})
        for number, layer in enumerate(self.layers):
            here = {
                name.removeprefix(f"layers.{number}."): value
                for name, value in state.items()
                if name.startswith(f"layers.{number}.")
            }
            parts = [here.pop(f"attention.{one}_proj.weight") for one in "qkv"]
            names = {
                "attention.out_proj": "out",
                "feed_forward.up_proj": "up",
                "feed_forward.down_proj": "down",
                "attention_norm": "norms.0",
                "feed_forward_norm": "norms.1",
            }
            own = {"qkv.weight": torch.cat(parts)}
            for name, value in here.items():
                part, _, kind = name.rpartition(".")
                own[f"{names[part]}.{kind}"] = value
            layer.load_state_dict(own)

    def forward(self, tokens: Tensor) -> Tensor:
        seq, width = tokens.shape[1], self.tokens.shape[1]
        if self.post_norm:
            angles = torch.arange(seq)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
            waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
            x = self.tokens[tokens] * width**0.5 + waves
        else:
            x = self.tokens[tokens] + self.places[:seq]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.T


@pytest.mark.parametrize("name", ["nanogpt", "decoder-2017"])
def test_a_published_design_equals_plain_pytorch(name: str) -> None:
    """Logits, loss and one update, with the weights of our model: nanoGPT's, and 1706.03762's."""
    recipe = Recipe.from_dict(read_yaml(FOLDER / f"{name}.yaml"))
    config, train, old = recipe.decoder_config(65), recipe.train, name == "decoder-2017"
    torch.manual_seed(0)
    ours = config.build()
    plain = PlainModel(ours, post_norm=old)
    rows = torch.randint(65, (3, train.seq_len + 1))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    logits = plain(tokens)
    torch.testing.assert_close(ours.eval()(tokens), logits)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1 * old)
    objective = train.objective.build(ours)
    found = objective(Batch(tokens, targets, None, torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(found.loss / found.count, loss)

    (found.loss / found.count).backward()
    loss.backward()
    if train.grad_clip:
        for model in (ours, plain):
            nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
    adam, rate = train.optimizer, (config.d_model * 4000) ** -0.5 if old else 1e-3
    assert (adam.beta1, adam.beta2, adam.eps) == ((0.9, 0.98, 1e-9) if old else (0.9, 0.95, 1e-8))
    gradients = copy.deepcopy(ours)
    with torch.no_grad():
        for gradient, weight in zip(gradients.parameters(), ours.parameters(), strict=True):
            gradient.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        # Adam's first update, with weight decay of matrices. Both models use the same gradients,
        # because it amplifies the rounding of small ones.
        of_ours = PlainModel(gradients, post_norm=old).parameters()
        for weight, gradient in zip(plain.parameters(), of_ours, strict=True):
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
            weight.mul_(1 - rate * (0.1 if weight.ndim > 1 and not old else 0))
            weight.sub_(rate * gradient / (gradient.abs() + adam.eps))
    build_optimizer(ours, train.optimizer).step(1.0)
    torch.testing.assert_close(ours(tokens), plain(tokens))
    if not old:  # GPT-2's initial weights
        for weight, values in config.build().named_parameters():
            small = weight.endswith(("out_proj.weight", "down_proj.weight"))
            expected = 0 if "norm" in weight else 0.02 / 8**0.5 if small else 0.02
            assert values.std().item() == pytest.approx(expected, rel=0.05)


KNOWN = "`Lock` is a class of `threading`. A lock that is not reentrant."


@pytest.mark.parametrize(
    ("answer", "form", "name", "kind", "module"),
    [
        (KNOWN, 1, 1, 1, 1),
        (" `Lock` is a class of `threading`. Another sentence.\n", 1, 1, 1, 1),
        ("`Luck` is a function of `thread`. A sentence.", 1, 0, 0, 0),
        ("`Lock` is a class of `threading`. It is a lock it is a lock it is a", 0, 1, 1, 1),
        (
            "`Lock` is a class of `threading`. It is the lock that is the lock that is the lock.",
            0,
            1,
            1,
            1,
        ),
        ("`Lock` is a class of `threading`. LOLOLOCK.", 0, 1, 1, 1),
        ("`Lock` is a class of `threading`. A lock that is", 0, 1, 1, 1),
        ("`Lock` is a class of `threading`.", 0, 0, 0, 0),
        ("Lock is a class of threading. A lock.", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_rewards_of_answers_about_the_standard_library(answer, form, name, kind, module):
    spec = importlib.util.spec_from_file_location("stdlib_answers", FOLDER / "stdlib_answers.py")
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    given = [""], [answer], [KNOWN]
    assert answers.form(*given) == [form]
    assert [answers.name(*given), answers.kind(*given), answers.module(*given)] == [
        [name],
        [kind],
        [module],
    ]
    assert answers.reward(*given) == [(form + name + kind + module) / 4]


@pytest.mark.parametrize(
    ("begun", "variables", "settings"),
    [
        ("", [], "train.steps=1469 train.minutes=5"),
        ("", ["STEPS=50"], "train.steps=50"),
        ("  steps: 400\n  minutes: null\n", [], "--resume train.steps=400 train.minutes=null"),
        ("  steps: 400\n", ["STEPS=50"], "--resume train.steps=400"),
    ],
)
def test_the_demo_is_bounded_and_a_begun_one_keeps_its_length(
    begun: str, variables: list[str], settings: str, tmp_path: Path
) -> None:
    shutil.copy(FOLDER.parent / "Makefile", tmp_path)
    shutil.copytree(FOLDER, tmp_path / "recipes")
    if begun:
        (tmp_path / "runs" / "stdlib-small").mkdir(parents=True)
        (tmp_path / "runs" / "stdlib-small" / "recipe.yaml").write_text(f"train:\n{begun}")
    for name in ("constraints.txt", "pyproject.toml", ".venv/.made", ".venv/.torch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".venv" / ".installed").touch()
    words = ["make", "--dry-run", "demo", *variables]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    command = " ".join(done.stdout.replace("\\\n", " ").partition(" evaluate")[0].split())
    assert settings in command
    assert command.count("train.steps=") == 1
    assert ("train.minutes=5" in command) == (not begun and not variables)


@pytest.mark.slow
def test_from_nothing_to_a_chat(tmp_path):
    """`make chat` with a tiny model: every stage, and the second call repeats none."""
    folder = shutil.copytree(FOLDER, tmp_path / "recipes")
    base = folder / "stdlib-small.yaml"
    fields = read_yaml(base)
    fields["model"]["d_model"] = 16
    fields["model"]["blocks"]["main"]["attention"]["n_heads"] = 2
    fields["model"]["blocks"]["main"]["feed_forward"]["d_ff"] = 16
    fields["tokenizer"]["vocab_size"] = 1024
    text = tmp_path / "text.txt"
    text.write_text((Path(argparse.__file__)).read_text())
    fields["data"]["corpus"] = {"kind": "text", "path": str(text)}
    base.write_text(json.dumps(fields))
    settings = [
        "train.steps=4",
        "train.schedule.warmup_steps=1",
        "train.samples=null",
        "train.batch_size=2",
    ]

    def chat() -> list[str]:
        command = [sys.executable, "recipes/chat.py", *settings]
        environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src")}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + (tmp_path / "runs" / "chat.log").read_text()
        return done.stdout.splitlines()

    lines = chat()
    stages = ["pretrain", "fine-tune", "pairs", "preferences", "compare"]
    assert [line.split()[0] for line in lines[:5]] == stages
    assert all(re.fullmatch(r"[a-z-]+ +\d+:\d\d  .+", line) for line in lines[:5])
    assert re.search(r"train: \d of 8 answers are wrong; validation: \d of 8", lines[2])
    runs = [f"runs/stdlib-{name}" for name in ("small", "chat", "preferences")]
    assert [line.split()[0] for line in lines[6:9]] == runs
    assert "> What is threading.Thread?" in lines
    made = (tmp_path / "runs" / "stdlib-pairs" / "train.jsonl").stat().st_mtime
    again = chat()
    assert again[6:] == lines[6:]  # the models are the same
    assert (tmp_path / "runs" / "stdlib-pairs" / "train.jsonl").stat().st_mtime == made
