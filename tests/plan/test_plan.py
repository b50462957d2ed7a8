"""`workhorse plan`: its output, its HTML page, its JSON, and its errors."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.families import small
from workhorse.checkpoints.huggingface.export import write_huggingface
from workhorse.cli.main import main
from workhorse.devices.memory import GIB, size
from workhorse.errors import WorkhorseError
from workhorse.memory import device_memory
from workhorse.memory.capacity import MARGIN, shares
from workhorse.memory.step_memory import PlannedStep, StepMemory, step_memory
from workhorse.models import preset
from workhorse.models.describe import count_parameters
from workhorse.parallel.config import UNDIVIDED
from workhorse.plan import known_devices, plan, plan_devices
from workhorse.plan.page import COLORS, Bar, lines, stacked, write_page
from workhorse.plan.subject import find_subject
from workhorse.train.report.page import duration

SMALL = ("gpt2", "model.n_layers=2", "model.d_model=96", "model.vocab_size=512", "train.seq_len=64")


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the search for the largest step that fits, which records many steps."""
    monkeypatch.setattr("workhorse.plan.limits.largest", lambda *_, **__: 1)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_preset_on_a_known_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    out = printed(capsys, *SMALL, "--device", "a100", "--price", "2", "--page", str(page))
    for heading in ("parameters", "arithmetic", "memory", "time", "serving"):
        assert f"\n{heading}\n" in out
    assert "fits: NVIDIA A100 SXM 80 GB has" in out
    assert "312T FLOP/s (NVIDIA A100 SXM 80 GB, bfloat16, NVIDIA A100 data sheet)" in out
    assert "at the price given" in out
    assert "assumed: train.batch_size=1" in out
    drawn = page.read_text()
    assert drawn.count("<svg") == 2
    assert "http://" not in drawn
    assert "https://" not in drawn


def test_json_has_the_account(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *SMALL, "--device", "h100", "--json"))
    config = preset("gpt2").replace(n_layers=2)
    assert found["config"]["n_layers"] == config.n_layers
    assert found["parameters"]["total"] == sum(
        found["parameters"][name]
        for name in ("embedding", "attention", "feed_forward", "norms", "head")
    )
    assert found["flops"]["per_token"] == 3 * sum(found["flops"]["forward"].values())
    peak = found["memory"]["peak"]
    kinds = [peak[kind] for kind in peak if kind not in ("phase", "part", "total")]
    assert peak["total"] == sum(kinds)
    assert peak["total"] == max(
        sum(size for key, size in moment.items() if key not in ("phase", "part"))
        for moment in found["moments"]
    )
    time = found["time"]
    reached = time["peak_flops"] * time["utilization"]
    assert time["seconds"] == pytest.approx(found["flops"]["training"] / reached)
    assert time["seconds"] == pytest.approx(time["steps"] * sum(time["step"].values()))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a b c d\n" * 500)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: planned\n"
        "model: {preset: gpt2, n_layers: 1, d_model: 48, vocab_size: 300}\n"
        "tokenizer: {kind: bytes}\n"
        f"data: {{corpus: {{kind: text, path: {tmp_path / 'text.txt'}}}}}\n"
        "train: {steps: 1, batch_size: 2, seq_len: 32}\n"
    )
    return file


RECOMPUTED = "train.activation_checkpointing=true"


@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize("adapter", [[], ["adapter.rank=4"]])
def test_recomputation_takes_time_on_every_device(adapter: list[str]) -> None:
    """The time of l4 is a fraction of its peak; that of h100 is simulated."""
    settings = [*SMALL[1:], "train.steps=10", "train.batch_size=64", *adapter]
    for device in ("l4", "h100"):
        once, again = (
            plan("gpt2", given, device=device) for given in (settings, [*settings, RECOMPUTED])
        )
        flops = again["flops"]
        layers = sum(flops["forward"].values()) - flops["forward"]["head"]
        assert flops["repeated_per_token"] == layers
        more = 1 + layers / flops["per_token"]
        assert again["flops"]["training"] == once["flops"]["training"]
        for time in (once["time"], again["time"]):
            done = flops["training"] * (more if time is again["time"] else 1)
            reached = time["peak_flops"] * time["utilization"]
            assert time["seconds"] == pytest.approx(done / reached)
        if device == "l4":
            assert again["time"]["seconds"] == pytest.approx(more * once["time"]["seconds"])
        assert again["time"]["seconds"] > once["time"]["seconds"]
    full = plan("gpt2", settings, device="l4", memory=0.02)
    (cost,) = [one["cost"] for one in full["remedies"] if one["setting"] == RECOMPUTED]
    assert cost == f"{more - 1:.0%} more arithmetic"


@pytest.mark.usefixtures("without_limits")
def test_fine_tuning_has_a_price_per_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = [*SMALL, "adapter.rank=4", "--device", "l4", "--price", "0.8"]
    found = json.loads(printed(capsys, *adapter, "--json"))
    shapes = [*[(96, 96)] * 4, (96, 3072), (3072, 96)]  # of each of two layers
    assert found["parameters"]["trained"] == 2 * 4 * sum(map(sum, shapes))
    assert found["compute_optimal"] is None
    assert (found["train"]["steps"], found["time"]["steps"]) == (None, None)
    assert not [one for one in found["assumed"] if one.startswith("train.steps")]
    flops, time = found["flops"], found["time"]
    assert flops["training"] == 10**6 * flops["per_token"]
    assert time["seconds"] == pytest.approx(flops["training"] / (0.4 * 121e12))
    assert time["cost"] == pytest.approx(0.8 * time["seconds"] / 3600)
    out = printed(capsys, *adapter)
    assert f"{found['parameters']['trained']:,} trained (the adapter)" in out
    assert " for 1,000,000 tokens on 1 device at 40% of 121T FLOP/s" in out
    assert "at the price given, for each 1,000,000 tokens; set train.steps for a total" in out
    assert "compute-optimal" not in out
    given = json.loads(printed(capsys, *adapter, "train.steps=7", "--json"))
    assert given["time"]["seconds"] == pytest.approx(time["seconds"] * 7 * 64 / 10**6)
    assert given["time"]["steps"] == given["train"]["steps"] == 7
    assert " for 7 steps on 1 device" in printed(capsys, *adapter, "train.steps=7")
    whole = plan("gpt2", [*SMALL[1:], "init=runs/first"], device="l4")
    assert (whole["flops"]["tokens"], whole["compute_optimal"]) == (10**6, None)


def test_several_devices_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    several = [*SMALL, "adapter.rank=4", "--device", "l4,rtx-4090,H100"]
    prices = ["--price", "0.8", "--price", "0.5", "--price", "2.5"]
    out = printed(capsys, *several, *prices, "train.batch_size=64")
    head, *rows = out.split("\n\n")[1].splitlines()
    assert head.split("  ")[0] == "device"
    assert [row.split()[0] for row in rows] == ["l4", "rtx-4090", "H100"]
    found = json.loads(printed(capsys, *several, *prices, "--json", "train.batch_size=64"))
    for row, (name, one), price in zip(
        rows, found["devices"].items(), (0.8, 0.5, 2.5), strict=True
    ):
        alone = plan("gpt2", [*several[1:6], "train.batch_size=64"], device=name, price=price)
        assert one == json.loads(json.dumps(alone))
        cells = re.split("  +", row.replace("≥ ", ""))  # the search has tried no larger ones
        assert cells[1] == size(one["memory"]["room"])
        assert cells[3:6] == [
            "yes",
            f"{one['limits']['micro_batch_size']:,}",
            f"{one['limits']['seq_len']:,}",
        ]
        assert cells[6] == duration(one["time"]["seconds"])
    assert all("  ≥ 131,072  " in row for row in rows)
    narrow = [*several, "--memory", "0.01", "train.batch_size=64"]
    out = printed(capsys, *narrow)
    assert "l4: train.micro_batch_size=" in out
    assert "cost" not in out


def test_devices_share_the_records_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def record(step: PlannedStep, **options: Any) -> StepMemory:
        recorded.append(step.config.to_json())
        return step_memory(step, **options)

    monkeypatch.setattr(device_memory, "_RECORDS", {})
    monkeypatch.setattr(device_memory, "step_memory", record)
    settings = [*SMALL[1:], "adapter.rank=4"]
    plan_devices("gpt2", settings, ["l4"])
    first = len(recorded)
    plan_devices("gpt2", settings, ["l4", "rtx-4090"])  # both have 24 GB
    assert len(recorded) == first > 0


def test_a_recipe_here(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, str(recipe), "--json"))
    assert found["kind"] == "recipe"
    assert found["assumed"] == []
    assert found["time"] is None
    assert found["memory"]["fits"]
    assert "this machine" in found["device"]["name"]


def test_a_pipeline_here(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is recorded with this machine's operators; the first stage has the embedding."""
    stages = ["model.n_layers=4", "parallel.pipeline=2"]
    found = json.loads(printed(capsys, str(recipe), *stages, "--json"))
    assert found["memory"]["stage"] == 0
    assert "embedding" in found["memory"]["held"]["weights"]
    assert main(["train", str(recipe), *stages, "train.micro_batch_size=auto", "--dry-run"]) == 0


@pytest.mark.usefixtures("without_limits")
def test_documents_in_rows_need_a_mask(recipe: Path) -> None:
    whole = plan(recipe, device="h100")["memory"]["activations"]
    packed = plan(recipe, ["data.packing=documents"], device="h100")["memory"]["activations"]
    assert packed["layers.0"] > whole["layers.0"]


@pytest.mark.usefixtures("without_limits")
def test_a_run_is_planned_as_its_recipe(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    longer = "train.batch_size=3"
    found, before = (plan(source, [longer], device="h100") for source in (run, recipe))
    assert found["kind"] == "run"
    for key in ("config", "train", "parameters", "flops", "memory"):
        assert found[key] == before[key], key


@pytest.mark.usefixtures("without_limits")
def test_a_hugging_face_directory(tmp_path: Path) -> None:
    config = small("llama", tie_word_embeddings=True)
    write_huggingface(tmp_path / "hf", config.build())
    found = plan(tmp_path / "hf", ["train.seq_len=16"], device="h100")
    assert found["parameters"]["total"] == count_parameters(config)["total"]
    assert found["config"]["max_seq_len"] == config.max_seq_len
    assert found["assumed"][0] == "train.batch_size=1"
    assert found["train"]["seq_len"] == 16


@pytest.mark.usefixtures("without_limits")
def test_what_is_given_is_not_assumed() -> None:
    given = [*SMALL[1:], "train.optimizer={kind: muon}", "train.batch_size=2"]
    assumed = plan(SMALL[0], given, device="h100")["assumed"]
    assert not [one for one in assumed if one.startswith(("train.optimizer", "train.batch_size"))]
    assert "train.dtype=bfloat16" in assumed


@pytest.mark.usefixtures("without_limits")
def test_settings_hold_for_a_model_without_a_recipe() -> None:
    settings = [*SMALL[1:], "train.batch_size=2", "train.schedule.warmup_steps=20"]
    whole = plan(SMALL[0], settings, device="h100")
    packed = plan(SMALL[0], [*settings, "data.packing=documents"], device="h100")
    layer = "layers.0"
    assert packed["memory"]["activations"][layer] > whole["memory"]["activations"][layer]
    assert whole["train"]["steps"] == round(20 * whole["parameters"]["total"] / (2 * 64))


@pytest.mark.usefixtures("without_limits")
def test_minutes_come_to_the_steps_that_the_time_of_one_allows() -> None:
    said: list[str] = []
    found = plan("gpt2", [*SMALL[1:], "train.minutes=5"], device="h100", notify=said.append)
    assert found["train"]["minutes"] is None
    assert found["time"]["steps"] == found["train"]["steps"]
    assert 0.9 * 300 < found["time"]["seconds"] <= 300
    assert said[0].startswith(f"train.minutes=5 gives train.steps={found['time']['steps']} at ")


@pytest.mark.usefixtures("without_limits")
def test_what_does_not_fit_has_remedies() -> None:
    batch = "train.batch_size=64"
    found = plan(SMALL[0], [*SMALL[1:], batch], device="h100", memory=0.05)
    assert not found["memory"]["fits"]
    savings = [remedy["saves"] for remedy in found["remedies"]]
    assert min(savings) > 0
    assert found["remedies"][0]["setting"] == "train.micro_batch_size=8"
    for rows, fits in ((8, True), (16, False)):
        settings = [*SMALL[1:], batch, f"train.micro_batch_size={rows}"]
        assert plan(SMALL[0], settings, device="h100", memory=0.05)["memory"]["fits"] is fits
    # The combination changes the micro-batch, then the recomputation, then the optimizer.
    before = plan(SMALL[0], [*SMALL[1:], batch], device="h100", memory=0.0255)
    *single, together = before["remedies"]
    assert [remedy["fits"] for remedy in (*single, together)] == [False] * 3 + [True]
    settings = [*SMALL[1:], batch, *together["setting"].split()]
    after = plan(SMALL[0], settings, device="h100", memory=0.0255)
    assert after["memory"]["fits"]
    peaks = [one["memory"]["peak"]["total"] for one in (before, after)]
    assert peaks[0] - peaks[1] == together["saves"]
    out = "\n".join(lines(found))
    assert "does not fit: NVIDIA H100 SXM has 51.2 MiB" in out
    assert "train.micro_batch_size=8: saves" in out


def test_one_row_that_does_not_fit_has_no_limits(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("train.batch_size=64", "--device", "h100", "--memory", "0.0005")
    out = printed(capsys, *SMALL, *given)
    assert "not even one row of 64 tokens fits" in out
    assert "MiB, too large to serve one such sequence" in out


@pytest.mark.usefixtures("without_limits")
def test_the_micro_batch_is_the_one_that_training_would_take() -> None:
    settings = [*SMALL[1:], "train.batch_size=4096", "train.micro_batch_size=auto"]
    found = plan("gpt2", settings, device="h100", memory=1.0)
    rows = found["train"]["micro_batch_size"]
    assert rows in shares(4096)[1:-1]
    assert found["memory"]["peak"]["total"] <= (1 - MARGIN) * GIB
    twice = plan("gpt2", [*settings, f"train.micro_batch_size={2 * rows}"], device="h100")
    assert twice["memory"]["peak"]["total"] > (1 - MARGIN) * GIB


@pytest.mark.usefixtures("without_limits")
def test_a_mesh_divides_the_work() -> None:
    settings = [*SMALL[1:], "train.batch_size=8"]
    given = {"device": "h100", "utilization": 0.4}
    one = plan("gpt2", settings, **given)
    eight = plan("gpt2", [*settings, "parallel.shard=4", "parallel.tensor=2"], **given)
    assert eight["parallel"]["devices"] == 8
    assert eight["time"]["seconds"] == pytest.approx(one["time"]["seconds"] / 8)
    assert eight["time"]["step"] is None
    assert eight["memory"]["peak"]["total"] < one["memory"]["peak"]["total"] / 4


@pytest.mark.usefixtures("without_limits")
def test_several_devices_have_no_time_without_a_utilization(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = [*SMALL, "--device", "h100", "--devices", "2"]
    out = printed(capsys, *several)
    assert "unknown for 2 devices; give --utilization" in out
    assert ", on the fullest of 2 devices" in out
    assert "fits: NVIDIA H100 SXM has" in out
    *_, row = printed(capsys, *SMALL, "--device", "l4,h100", "--devices", "2").splitlines()
    assert re.split("  +", row)[3:] == ["yes", "1", "1"]
    message = "a time estimate, which is not available for 2 devices; add --utilization"
    assert f"--price 2 needs {message}" in refused(capsys, *several, "--price", "2")
    assert f"train.minutes=5 needs {message}" in refused(capsys, *several, "train.minutes=5")


@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize(
    "setting", ["train.kernel=flex", "train.fp8=true", "train.execution=compiled"]
)
def test_what_no_tensor_without_data_runs_is_planned_as_what_needs_as_much(setting: str) -> None:
    small = ["model.n_layers=1", "model.vocab_size=512", "train.kernel=sdpa"]
    plain = plan("smollm2-135m", small, device="h100")
    found = plan("smollm2-135m", [*small, setting], device="h100")
    assert found["memory"] == plain["memory"]
    key, _, value = setting.removeprefix("train.").partition("=")
    assert str(found["train"][key]).lower() == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2", "--device", "h10"], "unknown device 'h10'; did you mean 'h100'?"),
        ([*SMALL, "--device", "h100", "parallel.tensor=5"], "tensor=5 does not divide n_heads=12"),
        ([*SMALL, "parallel.foo=2"], "unknown key 'foo'"),
        (
            [*SMALL, "parallel.data=2", "parallel.expert=2"],
            "expert=2 needs routed experts, but the model has none",
        ),
        (
            ["gpt2", "--device", "t4"],
            "no published matmul rate for bfloat16; choose train.dtype=float32",
        ),
        (["gpt2", "--device", "v100", "train.dtype=float16"], "float16 cannot be planned"),
        (["gpt2", "--device", "h100", "--measure"], "--measure measures this machine"),
        (
            ["gpt2", "--price", "2"],
            "--price 2 needs a time estimate, which is not available for this machine; add",
        ),
        (["gpt2", "--utilization", "0.4"], "--utilization 0.4 needs a time estimate, which is not"),
        (
            ["gpt2", "--device", "h100", "--context", "4096"],
            "set model.max_seq_len=4096, or choose",
        ),
        (["gpt2", "train.seq_len=99999"], "set model.max_seq_len=99999, or shorten"),
        (["gpt2", "--device", "l4,h100", "--measure"], "--measure measures this machine"),
        (["gpt2", "--device", "l4,h100", "--page", "a.html"], "--page shows one device, not l4,h1"),
        (["gpt2", "--device", "l4,l4"], "--device l4 is given 2 times; keep one"),
        (["gpt2", "--device", "l4,h10"], "unknown device 'h10'; did you mean 'h100'?"),
        (["gpt2", "--device", "l4,h100", "--price", "1"], "--price is given 1 times for 2 devices"),
        (
            ["gpt2", "adapter.rank=4", "--budget", "1e18"],
            "--budget 1e+18 has no effect on an adapter; remove it",
        ),
        (["nothing"], "there is no folder, hub id or preset 'nothing'"),
        (["missing.yaml"], "cannot read missing.yaml"),
        (["gpt2", "--memory", "0"], "Invalid value for '--memory'"),
        (["gpt2", "--memory", "nan"], "--memory nan is not a number; give one, or"),
        (["gpt2", "--memory", "1e300"], "--memory 1e+300 is out of range"),
        (["gpt2", "--budget", "inf"], "--budget inf is out of range"),
        (["gpt2", "--device", "h100", "--price", "nan"], "--price nan is not a number"),
        (["gpt2", "--device", "h100", "--utilization", "1e-320"], "is out of range"),
        (["gpt2", "train.batch_size=0"], "train.batch_size: 0 is too small"),
        (["gpt2", "train.seq_len=long"], "train.seq_len: 'long' is not a whole number"),
        (["gpt2", "train=3"], "train: expected settings, got 3"),
        (["gpt2", "--device", "h100", "model.d_model=1200000000"], "a step needs 2^63 bytes"),
        (["gpt2", "--page", "."], "cannot write .: Is a directory"),
        (["gpt2", "--page", "missing/page.html"], "No such file or directory"),
        (["gpt2", "train={batch_size: 2}"], "train: 'seq_len' is missing"),
        (
            [*SMALL, "train.minutes=5"],
            "train.minutes=5 needs a time estimate, which is not available for this",
        ),
    ],
)
def test_wrong_input_gets_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_every_device_has_a_peak_and_a_source() -> None:
    for name, device in known_devices().items():
        assert device.memory > 0, name
        assert device.source, name
        dtype = next(d for d in ("bfloat16", "float16", "float32") if getattr(device, d))
        assert device.peak(getattr(torch, dtype)) > 1e12, name


def test_bars_stand_on_each_other() -> None:
    svg = stacked([Bar("a", {"weights": 2**30, "gradients": 0}), Bar("b", {"loss": 3 * 2**30})])
    assert svg.count("<rect") == 2
    assert "a: 1.0 GiB (weights 1.0 GiB)" in svg


def test_labels_of_bars_leave_each_other_room() -> None:
    names = [f"backward layers.{number}" for number in range(24)]
    svg = stacked([Bar(name, {"weights": 2**30}) for name in names])
    places = [float(x) for x in re.findall(r'class="x" x="([0-9.]+)"', svg)]
    assert 2 <= len(places) < 16
    assert min(b - a for a, b in pairwise(places)) > 6 * len(names[-1])
    assert places[-1] + 3 * len(names[-1]) < 1120


def test_a_page_promises_what_it_draws(tmp_path: Path) -> None:
    found = plan("gpt2", SMALL[1:], device="h100", devices=2)
    write_page(tmp_path / "page.html", found)
    page = (tmp_path / "page.html").read_text()
    assert "their gradients" not in page
    for kind, color in COLORS.items():
        assert (f"background: {color}" in page) == (f'fill="{color}"' in page), kind


def test_devices_shard_the_weights_or_fill_up_the_mesh() -> None:
    sharded = find_subject("gpt2", devices=8)
    assert sharded.mesh.ways == {**UNDIVIDED.ways, "shard": 8}
    assert (sharded.train.batch_size, "train.batch_size=8" in sharded.assumed) == (8, True)
    filled = find_subject("gpt2", ["parallel.tensor=2", "train.batch_size=16"], devices=8)
    assert filled.mesh.ways == {**UNDIVIDED.ways, "tensor": 2, "data": 4}
    assert filled.train.batch_size == 16
    assert find_subject("gpt2", ["parallel.shard=4"]).train.batch_size == 4
    with pytest.raises(WorkhorseError, match="tensor=2 does not divide 3 processes"):
        find_subject("gpt2", ["parallel.tensor=2"], devices=3)


def test_an_adapter_of_a_preset_is_counted() -> None:
    found = find_subject("gpt2", ["adapter.rank=4"])
    assert found.adapter is not None
    assert found.adapter.rank == 4
    assert found.train.optimizer.kind == "adamw"
    assert find_subject("gpt2").adapter is None
    assert find_subject("gpt2", ["adapter.rank=4"], devices=3).mesh.data == 3
    assert find_subject("gpt2", devices=3).mesh.shard == 3
