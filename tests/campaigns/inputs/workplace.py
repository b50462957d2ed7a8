"""The folder that every attempt runs in: one small valid input of each kind that verbs read."""

import hashlib
import json
import os
import stat
from pathlib import Path

from workhorse.cli.main import main

RECIPE = """\
name: tiny
model:
  d_model: 16
  n_layers: 1
  blocks:
    main:
      kind: pre_norm
      norm: {kind: rms_norm}
      attention: {kind: attention, n_heads: 2, position: {kind: rope}}
      feed_forward: {kind: gated_mlp, d_ff: 32}
  final_norm: {kind: rms_norm}
tokenizer: {kind: bytes}
data:
  corpus: {kind: folder, path: texts, validation: texts}
train:
  steps: 2
  batch_size: 2
  seq_len: 64
  optimizer: {kind: adamw, learning_rate: 0.001}
  schedule: {kind: constant, warmup_steps: 0}
  threads: 1
  log_every: 1
  samples: {every: 1, max_new_tokens: 2}
"""
STUDY = """\
name: depth
base: recipe.yaml
variants: {one: {}, two: {model.n_layers: 2}}
budget: {steps: 2}
seeds: [1]
quick: {budget: {steps: 1}}
"""
TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {data_files: questions.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [" yes", " no"]
doc_to_target: 0
"""
SOUND = (
    *("run", "hf", "native", "bpe", "prepared", "model.gguf", "texts", "text.txt", "lines.jsonl"),
    *(
        "recipe.yaml",
        "study.yaml",
        "task.yaml",
        "questions.jsonl",
        "empty",
        "binary",
        "link",
        "pipe",
    ),
)
"""Inputs in the workplace, which no output may replace."""
COMMANDS = (
    ["train", "recipe.yaml", "--out", "run"],
    ["data", "prepare", "recipe.yaml", "--out", "prepared"],
    ["convert", "run", "hf", "--to", "hf"],
    ["convert", "run", "native", "--to", "workhorse"],
    ["convert", "run", "model.gguf", "--to", "gguf"],
    ["tokenizer", "train", "text.txt", "--vocab-size", "280", "--out", "bpe"],
)


def build(place: Path) -> None:
    """Create all inputs in a new folder, with the command line itself."""
    place.mkdir()
    (place / "home").mkdir()
    (place / "tmp").mkdir()
    (place / "folder").mkdir()
    (place / "texts").mkdir()
    for name in "abc":
        (place / "texts" / f"{name}.txt").write_text(f"text {name} of some words\n" * 20)
    (place / "text.txt").write_text("some words of a text, and some words more\n" * 40)
    lines = (json.dumps({"text": f"line {number} of the lines"}) for number in range(40))
    (place / "lines.jsonl").write_text("\n".join(lines))
    (place / "recipe.yaml").write_text(RECIPE)
    (place / "study.yaml").write_text(STUDY)
    (place / "task.yaml").write_text(TASK)
    (place / "questions.jsonl").write_text(json.dumps({"question": "is it?"}) + "\n")
    (place / "empty").touch()
    (place / "binary").write_bytes(bytes(range(256)) * 8)
    (place / "link").symlink_to("nowhere")
    os.mkfifo(place / "pipe")
    before = Path.cwd()
    os.chdir(place)
    try:
        for command in COMMANDS:
            assert main(command) == 0, command
    finally:
        os.chdir(before)


def state(place: Path) -> dict[str, str]:
    """Every path in a folder, with its kind and, for a file, a hash of its content."""
    found = {}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            kind = stat.filemode(mode)
            if stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    kind += hashlib.file_digest(file, "md5").hexdigest()
            elif stat.S_ISLNK(mode):
                kind += os.readlink(path)
            found[os.path.relpath(path, place)] = kind
    return found
