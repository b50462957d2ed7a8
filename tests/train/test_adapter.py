"""Runs that train an adapter on the model of another run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.parallel import forked
from tests.parallel.runs import state_of
from tests.train.runs import assert_same_run, notices, step_losses, weights
from workhorse.checkpoints import CheckpointStore, RunDirectory, weights_of
from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.cli.main import main
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.model.load import load
from workhorse.nn import Decoder, DecoderConfig
from workhorse.plan import plan
from workhorse.run import train
from workhorse.run.dry_run import estimate
from workhorse.tokenizers import BytesConfig, train_tokenizer
from workhorse.train import Recipe, with_init
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.transforms.adapters import adapted_layers, adapter_parameters, disabled
from workhorse.transforms.quantization import QuantizedLinear

LORA: dict[str, Any] = {"kind": "lora", "rank": 2}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dropout": {"adapter": {"dropout": 0.3}},
    "dora in bfloat16": {"adapter": {"dora": True}, "train": {"dtype": "bfloat16"}},
    "micro-batches": {
        "adapter": {"also_train": ["final_norm"]},
        "train": {"dtype": "bfloat16", "micro_batch_size": 2},
    },
    "int4": {"adapter": {"quantize": "int4"}},
    "int8 in bfloat16": {
        "adapter": {"quantize": "int8", "dora": True},
        "train": {"dtype": "bfloat16"},
    },
    "muon": {"train": {"optimizer": {"kind": "muon"}}},
    "reference": {"train": {"execution": "reference"}},
}


@pytest.fixture
def base(make_recipe, corpus: Path, tmp_path: Path) -> Path:
    """A run to start from, wide enough to be quantised."""
    fields = make_recipe().to_dict()
    fields["model"] |= {"d_model": 32, "n_layers": 1, "vocab_size": 257, "max_seq_len": 16}
    tokenizer = train_tokenizer(BytesConfig(), [])
    run = RunDirectory(tmp_path / "base")
    run.path.mkdir()
    run.begin(Recipe.from_dict(fields).to_yaml())
    run.save_tokenizer(tokenizer)
    config = DecoderConfig.from_dict(fields["model"])
    run.save_config(config)
    run.store().save(2, weights_of(config.build()), {}, {"config": config.to_dict()})
    return run.path


def recipe_on(base: Path, make_recipe, adapter: Any = (), train: Any = ()) -> Recipe:
    fields = make_recipe(steps=6, checkpoint_every=3, eval_every=3, keep=3).to_dict()
    fields["train"].pop("optimizer")
    fields["train"] |= dict(train)
    for name in ("model", "tokenizer"):
        del fields[name]
    fields |= {"init": str(base), "adapter": LORA | dict(adapter)}
    return Recipe.from_dict(with_init(fields))


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return decoder(torch.tensor([[65, 66, 67, 68]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    kind: str, base: Path, make_recipe, tmp_path: Path
) -> None:
    recipe = recipe_on(base, make_recipe, **KINDS[kind])
    train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000006")
    torch.manual_seed(12345)
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=6)
    optimizers = [
        (tmp_path / out / "checkpoints/step-00000006/optimizer.safetensors").read_bytes()
        for out in ("whole", "resumed")
    ]
    assert optimizers[0] == optimizers[1]


def test_a_checkpoint_holds_only_the_adapter_and_load_adds_its_base(
    base: Path, make_recipe, tmp_path: Path
) -> None:
    recipe = recipe_on(base, make_recipe, {"also_train": ["final_norm"]})
    train(recipe, tmp_path / "run")
    saved = weights(tmp_path / "run", 6)
    trained = load(tmp_path / "run", execution="reference").decoder
    assert saved.keys() == adapter_parameters(trained).keys()
    assert all(torch.equal(trained.get_parameter(name), one) for name, one in saved.items())
    frozen = weights(base, 2)
    kept = [name for name in frozen if name != "final_norm.weight"]
    assert all(torch.equal(trained.get_parameter(name), frozen[name]) for name in kept)
    assert not torch.equal(trained.final_norm.weight, frozen["final_norm.weight"])
    state = CheckpointStore(tmp_path / "run/checkpoints").load(6)
    assert {name.rpartition(".")[0] for name in state.optimizer} == saved.keys()
    assert state.state["base"]["init"] == str(base)
    losses = step_losses(tmp_path / "run")
    assert losses[-1][1] < losses[0][1]


def test_the_adapter_of_a_run_is_added_to_its_base_merged_and_exported(
    base: Path, make_recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(recipe_on(base, make_recipe, {"also_train": ["final_norm"]}), run)
    expected = logits(load(run, execution="reference").decoder)
    found = load(base, adapter={"tuned": run}, execution="reference")
    assert torch.equal(logits(found.decoder), expected)
    for to, options in (("hf", {}), ("peft", {"adapter": tmp_path / "peft"})):
        assert main(["convert", str(run), str(tmp_path / to), "--to", to]) == 0
        model = base if options else tmp_path / to
        again = load(model, execution="reference", **options).decoder
        torch.testing.assert_close(logits(again), expected)
    with pytest.raises(WorkhorseError, match="trained a whole model, not an adapter"):
        load(base, adapter=base)
    moved = RunDirectory(shutil.copytree(base, tmp_path / "moved"))
    assert torch.equal(logits(load(moved.path, adapter=run).reference), expected)
    changed = {name: one + 1 for name, one in weights(base, 2).items()}
    config = {"config": moved.config.to_dict()}
    moved.store().save(3, changed, {}, config)
    with pytest.raises(WorkhorseError, match=r"moved .*are not those that the adapter was trained"):
        load(moved.path, adapter=run)
    prompt = ["--prompt", "a", "--max-new-tokens", "2"]
    assert main(["generate", str(base), "--adapter", str(run), *prompt]) == 0


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_loaded_run_computes_what_was_trained(
    quantize: str | None, base: Path, make_recipe, tmp_path: Path
) -> None:
    recipe = recipe_on(base, make_recipe, {"quantize": quantize})
    train(recipe, tmp_path / "run")
    trained = load(tmp_path / "run", execution="reference").decoder
    expected = load(base, execution="reference").decoder
    if quantize:
        place = expected.layers.get_submodule("0.feed_forward.up_proj")
        codes = QuantizedLinear.of(place, quantize)
        found = adapted_layers(trained)["layers.0.feed_forward.up_proj"]
        assert torch.equal(found.codes, codes.codes)
        assert type(trained.head.proj) is nn.Linear
    else:
        with disabled(trained):
            assert torch.equal(logits(trained), logits(expected))
    assert not torch.allclose(logits(trained), logits(expected), atol=1e-4)
    smaller = load(tmp_path / "run", quantize="int4", execution="reference").decoder
    assert all(one.format == "int4" for one in adapted_layers(smaller).values())


@pytest.mark.slow
def test_an_adapter_with_a_value_head(base: Path, make_recipe, tmp_path: Path) -> None:
    """The head is neither among the weights of the adapter nor in the loaded model."""
    fields = recipe_on(base, make_recipe).to_dict()
    fields["data"] = {"corpus": {"kind": "task", "task": "copy", "count": 40}, "packing": "padded"}
    fields["train"] |= {
        "dtype": "bfloat16",
        "objective": {"kind": "policy", "values": {}},
        "rollouts": {"completions": 2, "max_new_tokens": 4, "baseline": "none"},
    }
    recipe = Recipe.from_dict(fields)
    train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    train(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)
    loaded = load(tmp_path / "whole").decoder
    assert set(weights(tmp_path / "whole", 6)) == set(adapter_parameters(loaded))


def test_verbs_take_the_run(base: Path, make_recipe, tmp_path: Path, capsys) -> None:
    run = str(tmp_path / "run")
    train(recipe_on(base, make_recipe), run)
    words = ["generate", run, "--prompt", "12 and", "--max-new-tokens", "4"]
    assert main([*words, "--execution", "reference"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "Lora" not in capsys.readouterr().err  # it is merged
    text = str(tmp_path / "text.txt")
    Path(text).write_text("14 and 98; " * 20)
    assert main(["evaluate", run, "--data", text]) == 0
    assert main(["convert", run, str(tmp_path / "out"), "--to", "workhorse"]) == 0
    merged, trained = (load(one, execution="reference").decoder for one in (tmp_path / "out", run))
    torch.testing.assert_close(logits(merged), logits(trained))


def test_any_number_of_workers_gives_the_same_bits(base: Path, make_recipe, tmp_path: Path) -> None:
    fields = recipe_on(base, make_recipe, {"dropout": 0.2}).to_dict()
    fields["parallel"] = {"reduction": {"kind": "exact", "logical_shards": 2}}
    train(Recipe.from_dict(fields), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(fields))
    forked.train([str(file), "--out", str(tmp_path / "two")], 2, tmp_path / "said")
    assert state_of(tmp_path / "two") == state_of(tmp_path / "one")


def test_another_base_is_refused(base: Path, make_recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = recipe_on(base, make_recipe)
    train(recipe, run)
    shutil.rmtree(run / "checkpoints/step-00000006")
    kept = tmp_path / "kept"
    base.rename(kept)
    for use in (lambda: load(run), lambda: train(recipe, run, resume=True)):
        with pytest.raises(WorkhorseError, match="the base of the adapter cannot be loaded: "):
            use()
    shutil.copytree(kept, base)
    load(run)  # a copy of the base is the base
    other = CheckpointStore(base / "checkpoints")
    found = other.load(2)
    changed = {name: one + (name == "final_norm.weight") for name, one in found.model.items()}
    other.save(2, changed, found.optimizer, found.state)
    before = sorted(run.rglob("*"))
    for use in (lambda: load(run), lambda: train(recipe, run, resume=True)):
        with pytest.raises(WorkhorseError, match="are not those that the adapter was trained on"):
            use()
    assert sorted(run.rglob("*")) == before


def test_an_adapter_is_no_base(base: Path, make_recipe, tmp_path: Path) -> None:
    train(recipe_on(base, make_recipe), tmp_path / "first")
    with pytest.raises(WorkhorseError, match="is a run of an adapter and cannot be the base"):
        train(recipe_on(tmp_path / "first", make_recipe), tmp_path / "second")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"init": None}, "adapter: needs a trained model; set init"),
        ({"init_optimizer": True}, "adapter: does not support init_optimizer=true"),
        ({"parallel": {"shard": 2}}, "an adapter does not support parallel.shard=2; set it to 1"),
        ({"train": {"fp8": True}}, "adapter: does not support train.fp8=true"),
        ({"adapter": {"rnk": 3}}, "unknown key 'rnk'"),
        ({"adapter": {"quantize": "int2"}}, "adapter.quantize"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], line: str, base: Path, make_recipe) -> None:
    fields = recipe_on(base, make_recipe).to_dict()
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=line) as error:
        Recipe.from_dict(fields)
    assert "\n" not in str(error.value)


def test_wrong_targets_are_found_before_anything_is_written(
    base: Path, make_recipe, tmp_path: Path
) -> None:
    recipe = recipe_on(base, make_recipe, {"targets": ["q_prj"]})
    with pytest.raises(WorkhorseError, match="targets: no module is called q_prj"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # used by PEFT
def test_added_tokens_need_a_trained_embedding(base: Path, make_recipe, tmp_path: Path) -> None:
    """The run resumes, PEFT loads its export with the tokenizer, and it does not fit the base."""
    assert main(["convert", str(base), str(tmp_path / "hf"), "--to", "hf"]) == 0
    base = tmp_path / "hf"
    fields = recipe_on(base, make_recipe, {"also_train": ["final_norm"]}).to_dict()
    del fields["model"]
    fields["tokenizer"] = {"add_tokens": ["+++"]}
    recipe = Recipe.from_dict(with_init(fields))
    run = tmp_path / "run"
    remedy = r"tokens 257 to 257 .*rows of embedding; set .*also_train=\[final_norm, embedding\]'"
    with pytest.raises(WorkhorseError, match=remedy):
        train(recipe, run)
    fields["adapter"]["also_train"] += ["embedding"]
    told: list[Any] = []
    train(Recipe.from_dict(with_init(fields)), run, on_event=told.append)
    assert "1 new tokens start as the mean of the 257 tokens" in "\n".join(notices(told))
    shutil.copytree(run, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000006")
    train(Recipe.from_dict(with_init(fields)), tmp_path / "resumed", resume=True)
    assert_same_run(run, tmp_path / "resumed", step=6)
    with pytest.raises(WorkhorseError, match="added tokens to the 257 of its base; give the run"):
        load(base, adapter=run)
    ours = load(run, execution="reference").decoder
    peft, hf = pytest.importorskip("peft", minversion="0.21"), pytest.importorskip("transformers")
    assert main(["convert", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "peft")
    tokens = torch.tensor([tokenizer.encode("a+++")])
    assert 257 in tokens
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens))


def test_the_optimizer_is_adamw_unless_another_is_chosen(base: Path, make_recipe) -> None:
    assert recipe_on(base, make_recipe).train.optimizer.kind == "adamw"
    chosen = {"optimizer": {"learning_rate": 1e-4}}
    assert recipe_on(base, make_recipe, train=chosen).train.optimizer.kind == "adamw"
    chosen = {"optimizer": {"kind": "muon"}}
    assert recipe_on(base, make_recipe, train=chosen).train.optimizer.kind == "muon"


def test_a_dry_run_and_a_plan_count_the_adapter(base: Path, make_recipe, tmp_path: Path) -> None:
    recipe = recipe_on(base, make_recipe, train={"dtype": "bfloat16"})
    found = estimate(recipe)
    told: list[Any] = []
    train(recipe, tmp_path / "run", on_event=told.append)
    (start,) = (event for event in told if event["kind"] == "start")
    checkpoint = CheckpointStore(tmp_path / "run/checkpoints").load(6)
    trained = sum(one.numel() for one in checkpoint.model.values())
    assert found["parameters"]["trained"] == start["trained_parameters"] == trained
    assert found["parameters"]["total"] == start["parameters"]
    held = found["memory"]["held"]
    assert sum(held["low_bits"].values()) == 2 * trained
    state = sum(one.nbytes for one in checkpoint.optimizer.values())
    assert sum(held["optimizer"].values()) == state
    config = DecoderConfig.from_dict(found["config"])
    memory = step_memory(
        PlannedStep(config, recipe.train, torch.device("cpu"), adapter=recipe.adapter)
    )
    assert found["memory"]["peak"]["total"] == max(memory.totals)
    file = tmp_path / "adapter.yaml"
    file.write_text(recipe.to_yaml())
    planned = plan(file)
    assert planned["memory"]["peak"] == found["memory"]["peak"]
    assert planned["flops"]["per_token"] == found["flops_per_token"]


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_training_in_bfloat16_starts_as_the_base(quantize: str | None, base: Path) -> None:
    """The base is rounded before DoRA's magnitudes are measured, and they are not rounded."""
    config = load(base, execution="reference").config
    adapter = AdapterConfig(dora=True, quantize=quantize)
    cpu = torch.device("cpu")
    decoder = adapter.trainable(config, "auto", cpu, torch.bfloat16, weights(base, 2).items())
    fields = {"steps": 1, "batch_size": 1, "seq_len": 16, "dtype": "bfloat16"}
    body = build_step(decoder, TrainConfig(**fields), cpu).objective.decoder.eval()
    types = {name.rpartition(".")[2]: one.dtype for name, one in body.named_parameters()}
    assert types == {"weight": torch.bfloat16, "magnitude": torch.float32}
    after = logits(body)
    with disabled(body):
        assert torch.equal(logits(body), after)
