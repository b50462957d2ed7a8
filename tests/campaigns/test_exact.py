"""Campaign: a hundred steps with exact sums give the same bits on any number of workers.

`make campaign-exact` runs it and prints the common SHA-256.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parallel.runs import GATED, MIXTURE, fields, run, state_of

pytestmark = pytest.mark.campaign

KEPT = "parallel.reshard=step"
WALKS = {
    "1": [(1, 1)],
    "2": [(2, 1)],
    "3": [(3, 1)],
    "4": [(4, 1)],
    "shard 2": [(2, 2)],
    "shard 3": [(3, 3)],
    "shard 4": [(4, 4)],
    "data 2 × shard 2": [(4, 2)],
    "shard 2, kept": [(2, 2, KEPT)],
    "data 2 × shard 2, kept": [(4, 2, KEPT)],
    "1, 2, 4, 3, 1": [(1, 1), (2, 1), (4, 1), (3, 1), (1, 1)],
    "1, shard 2, 2 × 2, shard 3, 1": [(1, 1), (2, 2), (4, 2), (3, 3, KEPT), (1, 1)],
}
"""Workers, `parallel.shard` and more settings of each session; all have equally many steps."""
STEPS = 100
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "gated, float32, adamw": (GATED, {"optimizer": {"kind": "adamw"}}, {}),
    "mixture, bfloat16, adamw": (
        MIXTURE,
        {"dtype": "bfloat16", "optimizer": {"kind": "adamw"}, "balance_rate": 0.001},
        {},
    ),
    "gated, bfloat16, muon": (GATED, {"dtype": "bfloat16", "optimizer": {"kind": "muon"}}, {}),
    "gated, float32, adamw, plain PyTorch": (
        GATED,
        {"optimizer": {"kind": "adamw"}},
        {"WORKHORSE_NATIVE": "0"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_ends_in_the_same_bits(kind: str, tmp_path: Path) -> None:
    feed_forward, settings, environment = KINDS[kind]
    recipe = fields(tmp_path, feed_forward, steps=STEPS, batch_size=12, keep=1, **settings)
    recipe["train"]["checkpoint_every"] = STEPS
    recipe["parallel"] = {"reduction": {"kind": "exact", "logical_shards": 12}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    states: dict[str, dict[str, Any]] = {}
    for name, sessions in WALKS.items():
        out = tmp_path / name.replace(" ", "-")
        for number, (workers, ways, *own) in enumerate(sessions, start=1):
            steps = f"train.steps={STEPS * number // len(sessions)}"
            more = ["--workers", str(workers), *(["--resume"] if number > 1 else [])]
            words = [str(file), steps, f"parallel.shard={ways}", *own, "--out", str(out), *more]
            done = run(words, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
            assert done.returncode == 0, done.stderr
            assert ("train: reference" in done.stderr) == bool(environment)
        states[name] = state_of(out)
    for name, state in states.items():
        assert state == states["1"], name
    state = states["1"]
    print(f"\n{kind}: {STEPS} steps by {'; '.join(WALKS)}")
    print(f"  weights   {state['model.safetensors']}")
    print(f"  optimizer {state['optimizer.safetensors']}")
