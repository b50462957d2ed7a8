"""Learning from rewards: rollouts, their log-probabilities, and exact resuming."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import workhorse
from tests.train.conftest import MODEL
from tests.train.runs import assert_reference_is_checked, assert_same_run
from workhorse.checkpoints import CheckpointStore
from workhorse.config.base import ConfigError
from workhorse.data import IGNORE, Batch, Batches, prepare, prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import backend_of
from workhorse.execute.choose import decoding_backend
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder, DecoderConfig
from workhorse.run import train
from workhorse.run.dry_run import estimate
from workhorse.run.reference import token_values
from workhorse.tokenizers import BytesConfig, train_tokenizer
from workhorse.train import Recipe, TrainConfig, read_metrics, with_init
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.rollouts import Critic, RolloutConfig, Rollouts, prompts_of
from workhorse.train.step.build import build_step


def recipe(**train: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "rewards",
            "model": MODEL,
            "tokenizer": {"kind": "bytes", "special": {"chat": [f"<|{n}|>" for n in range(30)]}},
            "data": {
                "corpus": {"kind": "task", "task": "copy", "difficulty": 3, "count": 60},
                "packing": "padded",
            },
            "train": {
                "steps": 4,
                "batch_size": 8,
                "seq_len": 20,
                "log_every": 1,
                "checkpoint_every": 2,
                "eval_every": 2,
                "objective": {"kind": "policy"},
                "rollouts": {
                    "completions": 4,
                    "max_new_tokens": 5,
                    "reward": {"kind": "answer", "partial": True},
                },
                **train,
            },
        }
    )


def rollouts(tmp_path: Path, **config: Any) -> tuple[Rollouts, Any]:
    settings = recipe()
    tokenizer = prepare_tokenizer(settings.tokenizer, settings.data, tmp_path)
    dataset = prepare(settings.data, tokenizer, tmp_path)
    prompts = Batches(dataset.train, seq_len=20, batch_size=2, packing="padded")
    fields = {**MODEL, "vocab_size": tokenizer.vocab_size, "max_seq_len": 32}
    torch.manual_seed(0)
    decoder = DecoderConfig.from_dict(fields).build()
    options = RolloutConfig(completions=4, max_new_tokens=5, **config)
    made = Rollouts(
        prompts,
        decoding_backend(decoder, wait=True),
        tokenizer,
        options,
        stop_tokens=(tokenizer.eos_id,) if tokenizer.eos_id is not None else (),
        reward=options.reward.build(),
        seed=3,
    )
    return made, decoder


def test_the_prompt_of_a_conversation_ends_before_its_last_answer() -> None:
    tokenizer = train_tokenizer(BytesConfig(), ())
    tokens = tokenizer.encode("1+1? 2 3+4? 7 ")
    learned = {5, 6, 12, 13}  # the characters of both answers
    targets = [tokens[at] if at in learned else IGNORE for at in range(1, len(tokens))]
    batch = Batch(
        torch.tensor([tokens[:-1]]), torch.tensor([targets]), None, torch.zeros(1, dtype=torch.long)
    )
    (found,) = prompts_of(batch, tokenizer)
    assert (found.text, found.answer) == ("1+1? 2 3+4? ", "7 ")


def test_rows_are_completions_at_temperature_1_with_their_own_seeds(tmp_path: Path) -> None:
    """Also if they are processed together: rows of a prompt whose seeds are consecutive."""
    made, _ = rollouts(tmp_path)
    asked = [prompts_of(made.prompts[0], made.tokenizer)[0]] * 4
    together = made.complete(asked, [1, 2, 50, 51])
    alone = [
        generate(made.backend, [asked[0].tokens], GenerationConfig(max_new_tokens=5, seed=seed))[0]
        for seed in (1, 2, 50, 51)
    ]
    assert [tuple(one.tokens) for one in together] == [tuple(one.tokens) for one in alone]
    assert len({one.tokens for one in alone}) == 4


def test_the_rows_of_a_step(tmp_path: Path) -> None:
    made, decoder = rollouts(tmp_path)
    made.reward = lambda prompts, *_: [float(row in (1, 2)) for row in range(len(prompts))]
    batch = made[5]
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    assert batch.group is not None
    assert batch.group.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.advantages.view(2, 4).sum(dim=1).tolist() == pytest.approx([0, 0], abs=1e-6)
    asked = made.prompts[5]
    for row in range(8):
        learned = batch.targets[row] != IGNORE
        first = int(learned.nonzero()[0])
        assert 1 <= int(learned.sum()) <= 5
        prompt = batch.tokens[row, : first + 1]
        assert prompt.tolist() == asked.tokens[row // 4, : first + 1].tolist()
        assert (asked.targets[row // 4, :first] == IGNORE).all()  # the answer is not in the prompt
        assert asked.targets[row // 4, first] != IGNORE
        inputs = batch.tokens[row, first + 1 : first + int(learned.sum())]
        assert inputs.tolist() == batch.targets[row, first:][: len(inputs)].tolist()
    assert len({tuple(row.tolist()) for row in batch.targets}) > 4  # seeds differ
    # Recorded log-probabilities are those of the model; the ratio of the first update is 1.
    _, count, figures = PolicyConfig().build(decoder)(batch)
    assert float(figures["kl_old"] / count) < 1e-9
    assert float(figures["ratio_outside"]) == 0
    assert batch.values is not None
    figures = {
        "reward": batch.values.mean(),
        "reward_std": batch.values.std(correction=0),
        "equal_rewards": (batch.values.view(2, 4).std(dim=1) == 0).float().mean(),
        "completion_tokens": (batch.targets != IGNORE).sum() / 8,
        "longest_completion": (batch.targets != IGNORE).sum(dim=1).max(),
    }
    assert figures["equal_rewards"] == 0.5  # of two prompts
    for name, figure in figures.items():
        assert made.figures[name] == pytest.approx(float(figure)), name
    assert made[5].targets.tolist() == batch.targets.tolist()
    assert made[6].targets.tolist() != batch.targets.tolist()


def test_lengths_of_right_and_of_wrong_completions(tmp_path: Path) -> None:
    made, _ = rollouts(tmp_path)
    made.stop_tokens = tuple(range(64))  # so that lengths differ
    made.reward = lambda prompts, *_: [0.9, 1.0, 1.5, 0.0, *[0.0] * (len(prompts) - 4)]
    lengths = (made[0].targets != IGNORE).sum(dim=1).tolist()
    right, wrong = lengths[1:3], [lengths[0], *lengths[3:]]
    assert sum(right) / 2 != sum(wrong) / 6
    assert made.figures["right_tokens"] == pytest.approx(sum(right) / 2)
    assert made.figures["wrong_tokens"] == pytest.approx(sum(wrong) / 6)
    made.reward = lambda prompts, *_: [0.5 for _ in prompts]
    made[0]
    assert "right_tokens" not in made.figures
    assert made.figures["wrong_tokens"] == pytest.approx(sum(lengths) / 8)


def test_rollouts_follow_the_weights(tmp_path: Path) -> None:
    made, decoder = rollouts(tmp_path)
    before = made[0]
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(2)
    assert made[0].targets.tolist() != before.targets.tolist()


def test_unfinished_completions_can_be_ignored(tmp_path: Path) -> None:
    made, _ = rollouts(tmp_path, keep_unfinished=False)
    made.stop_tokens = tuple(range(30))
    batch = made[0]
    kept = (batch.targets != IGNORE).any(dim=1)
    assert int(kept.sum()) == round(8 * (1 - made.figures["unfinished"]))
    assert kept.any()
    assert not kept.all()
    lines: list[str] = []
    made.notify, made.stop_tokens = lines.append, ()
    assert all((made[step].targets == IGNORE).all() for step in (1, 2))
    (line,) = lines  # the first time
    assert line.startswith("step 2 learns nothing: all 8 completions reached train.rollouts.max")


def test_special_tokens_are_visible_except_the_end(tmp_path: Path) -> None:
    made, _ = rollouts(tmp_path)
    asked = prompts_of(made.prompts[0], made.tokenizer)[:1] * 64
    made.stop_tokens = ends = tuple(range(128))
    rolled = made.complete(asked, range(64))
    assert any(one.finished for one in rolled)
    assert any("<|" in one.text for one in rolled)
    for one in rolled:
        assert one.finished == (one.tokens[-1] in ends)
        assert one.text == made.tokenizer.decode([n for n in one.tokens if n not in ends])


def test_each_token_can_have_its_own_advantage(tmp_path: Path) -> None:
    """It is the change of the reward by the token, less the mean at this position of the group.

    The rewards are large, so that float32 would not represent their differences.
    """
    made, _ = rollouts(tmp_path, credit="token")

    def score(text: str) -> float:
        return 1e9 + sum(ord(letter) % 5 for letter in text) / 4

    made.reward = lambda prompts, completions, answers: [*map(score, completions)]
    batch = made[0]
    learned = batch.targets != IGNORE
    assert batch.advantages is not None
    assert not batch.advantages[~learned].any()
    gains = torch.zeros(8, 5)
    for row in range(8):
        ids = batch.targets[row, learned[row]].tolist()
        shown = ids[:-1] if ids[-1] in made.stop_tokens else ids
        scores = [score(made.tokenizer.decode(shown[:end])) for end in range(len(shown) + 1)]
        gains[row, : len(scores) - 1] = torch.tensor(scores, dtype=torch.float64).diff()
    expected = (gains.view(2, 4, 5) - gains.view(2, 4, 5).mean(dim=1, keepdim=True)).view(8, 5)
    for row in range(8):
        of_row = batch.advantages[row, learned[row]]
        torch.testing.assert_close(of_row, expected[row, : len(of_row)])


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings, told = recipe(), []
    result = train(settings, tmp_path / "whole", on_event=told.append)
    assert result.validation_loss is not None
    assert -1 <= result.validation_loss <= 0
    steps = [event for event in told if event["kind"] == "step"]
    assert all(0 <= event["reward"] <= 1 for event in steps)
    assert {"exact_match", "unfinished", "completion_tokens", "clip_fraction"} <= set(steps[0])
    *_, validation = [event for event in told if event["kind"] == "validation"]
    assert validation["reward"] == -validation["loss"] == -result.validation_loss
    assert {"exact_match", "completion_tokens"} <= set(validation)
    shown = _rollouts(tmp_path / "whole")
    assert [event["step"] for event in shown] == [1, 2, 3, 4]
    assert shown[0]["rollouts"][0].keys() == {"prompt", "text", "reward", "answer"}
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(max((tmp_path / "resumed" / "checkpoints").glob("*4")))
    train(settings, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=4)
    assert _rollouts(tmp_path / "resumed") == shown


def test_a_reward_function_may_be_corrected(tmp_path: Path) -> None:
    """The same call starts a run again that failed in its first step."""
    path, run = tmp_path / "rewards.py", tmp_path / "run"
    fields = recipe(steps=1, eval_every=None).to_dict()
    fields["train"]["rollouts"]["reward"] = {"kind": "python", "path": str(path)}
    path.write_text("def reward(p, c, a):\n    return [1 / 0 for _ in c]")
    with pytest.raises(WorkhorseError, match="raised ZeroDivisionError"):
        train(Recipe.from_dict(fields), run)
    assert [one.name for one in run.iterdir()] == ["data"]
    path.write_text("def reward(p, c, a):\n    return [1 for _ in c]")
    assert train(Recipe.from_dict(fields), run).step == 1
    path.write_text("def reward(p, c, a):\n    return [len(one) for one in c]")
    fields["train"]["steps"], told = 2, []
    train(Recipe.from_dict(fields), run, resume=True, on_event=told.append)
    changes = [event["setting"] for event in told if event["kind"] == "change"]
    assert changes == ["train.steps", str(path)]
    lines = [event["message"] for event in told if event["kind"] == "notice"]
    assert any(f"{path} changes from 'SHA-256" in line for line in lines)


def test_the_number_of_rollouts_in_the_metrics_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.train.loop.SHOWN_TIMES", 2)
    train(recipe(steps=6, checkpoint_every=6, eval_every=None), tmp_path / "run")
    assert [event["step"] for event in _rollouts(tmp_path / "run")] == [1, 4, 6]


def _rollouts(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run / "metrics.jsonl") if event["kind"] == "rollouts"]


def test_the_divergence_from_the_initial_model(tmp_path: Path) -> None:
    """It is 0 in the first step. A resumed run reads the initial model from the run directory."""
    objective = {"kind": "policy", "kl_weight": 0.5}
    optimizer = {"kind": "adamw", "learning_rate": 0.01}
    settings = recipe(objective=objective, micro_batch_size=2, optimizer=optimizer)
    run = tmp_path / "resumed"
    train(settings, tmp_path / "whole")
    metrics = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    first, *_, last = [event["kl"] for event in metrics if event["kind"] == "step"]
    assert first == 0
    assert last > 1e-6
    shutil.copytree(tmp_path / "whole", run)
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    train(settings, run, resume=True)
    assert_same_run(tmp_path / "whole", run, step=4)
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    assert_reference_is_checked(settings, run, "model.safetensors", "model that this run")


def test_the_divergence_from_the_model_without_the_adapter(tmp_path: Path) -> None:
    """It is 0 in the first step, and a resumed run continues it bit for bit."""
    base, whole, run = (tmp_path / name for name in ("base", "whole", "resumed"))
    train(recipe(), base)
    fields = recipe(objective={"kind": "policy", "kl_weight": 0.5}).to_dict()
    del fields["model"], fields["tokenizer"]
    fields |= {"adapter": {"rank": 2, "alpha": 4}, "init": str(base)}
    settings = Recipe.from_dict(fields := with_init(fields))
    train(settings, whole)
    metrics = read_metrics(whole / "metrics.jsonl")
    first, *_, last = [event["kl"] for event in metrics if event["kind"] == "step"]
    assert first == 0
    assert last > 0
    assert not (whole / "reference").exists()
    shutil.copytree(whole, run)
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    train(settings, run, resume=True)
    assert_same_run(whole, run, step=4)
    fields["adapter"] |= {"also_train": ["final_norm"]}
    with pytest.raises(ConfigError, match=r"does not support .* with also_train"):
        Recipe.from_dict(fields)


def test_the_reference_is_the_given_model(tmp_path: Path) -> None:
    """Its log-probabilities are those of a separate forward pass, in float64, at every target."""
    made, decoder = rollouts(tmp_path)
    objective = PolicyConfig().build(decoder)
    made.reference = lambda batch: objective.score(batch).target.detach()
    batch = made[0]
    assert batch.reference_tokens is not None
    learned = batch.targets != IGNORE
    logprobs = decoder.double()(batch.tokens).log_softmax(dim=-1)
    expected = logprobs.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(
        batch.reference_tokens[learned].double(), expected[learned], atol=1e-5, rtol=0
    )


VALUES = {
    "objective": {"kind": "policy", "values": {"weight": 1.0, "whiten": True}},
    "rollouts": {
        "completions": 4,
        "max_new_tokens": 5,
        "reward": {"kind": "answer", "partial": True},
        "baseline": "none",
    },
}


def test_a_value_head_is_saved_in_checkpoints_only(tmp_path: Path) -> None:
    """It starts at 0, is restored bit for bit, and is not part of the model."""
    settings, run = recipe(**VALUES, micro_batch_size=2, eval_every=None), tmp_path / "resumed"
    train(settings, tmp_path / "whole")
    assert {"value_loss", "reward"} <= read_metrics(tmp_path / "whole" / "metrics.jsonl")[1].keys()
    shutil.copytree(tmp_path / "whole", run)
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    train(settings, run, resume=True)
    assert_same_run(tmp_path / "whole", run, step=4)
    one, other = (
        CheckpointStore(path / "checkpoints").load(4) for path in (tmp_path / "whole", run)
    )
    assert one.state["objective"] == other.state["objective"]
    assert any(one.state["objective"]["weight"][0])
    names = {name for name in one.optimizer if name.startswith("value_head.")}
    assert names
    assert all(torch.equal(one.optimizer[name], other.optimizer[name]) for name in names)
    loaded = workhorse.load(run).reference
    assert set(one.model) == {name for name, _ in loaded.named_parameters()}


def test_values_are_recorded_when_completions_are_sampled(tmp_path: Path) -> None:
    """They are those of the current weights, without dropout, on each rank's share of the rows."""
    made, decoder = rollouts(tmp_path, baseline="none")
    config = PolicyConfig(values={"gae_lambda": 1.0})
    train_config = TrainConfig(
        steps=1, batch_size=8, micro_batch_size=3, seq_len=20,
        objective=config, rollouts=RolloutConfig(baseline="none"),
    )  # fmt: skip
    step = build_step(decoder, train_config, torch.device("cpu"))
    made.critic = Critic(config.values, token_values(step))
    step.objective.value_head.bias.data.fill_(0.25)
    batch = made[0]
    learned = batch.targets != IGNORE
    assert torch.equal(batch.old_values, 0.25 * learned)
    expected = (batch.values[:, None] - 0.25) * learned  # the reward, minus the value
    torch.testing.assert_close(batch.advantages, expected)
    torch.testing.assert_close(batch.returns, batch.values[:, None] * learned)
    assert step.objective.training
    _, count, figures = step.objective(batch)
    error = (0.25 - batch.values[:, None]).square() * learned / 2
    torch.testing.assert_close(figures["value_loss"] / count, error.sum() / learned.sum())


@pytest.mark.slow
def test_on_policy_distillation_approaches_the_teacher(tmp_path: Path) -> None:
    """20 steps lower KL(model || teacher) at completions of new prompts.

    `test_equivalences.py` resumes such a run.
    """
    made, student = rollouts(tmp_path)
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    for name, decoder in (("student", student), ("teacher", teacher)):
        workhorse.save(decoder, tmp_path / name, tokenizer=made.tokenizer)

    def reverse_kl(decoder: Decoder) -> float:
        made.backend = backend_of(decoder)
        found, count = 0.0, 0
        for step in range(100, 103):
            batch = made[step]
            learned = batch.targets != IGNORE
            p, q = (one(batch.tokens)[learned].log_softmax(-1) for one in (decoder, teacher))
            found, count = found + float((p.exp() * (p - q)).sum()), count + int(learned.sum())
        return found / count

    objective = {"kind": "distill", "teacher": str(tmp_path / "teacher"), "beta": 1.0}
    completions = {"completions": 1, "max_new_tokens": 5, "reward": None}
    fields = recipe(
        steps=20, objective=objective, rollouts=completions, eval_every=None,
        optimizer={"kind": "adamw", "learning_rate": 2e-2}, schedule={"kind": "constant"},
    ).to_dict()  # fmt: skip
    del fields["tokenizer"]  # that of the student
    fields |= {"init": str(tmp_path / "student"), "model": {}}
    settings = Recipe.from_dict(with_init(fields))
    run, told = tmp_path / "run", []
    train(settings, run, on_event=told.append)
    steps = [event for event in told if event["kind"] == "step"]
    assert "exact_match" in steps[0]
    assert not {"reward", "equal_rewards"} & steps[0].keys()
    assert "reward" not in _rollouts(run)[0]["rollouts"][0]
    with torch.no_grad():
        before, after = reverse_kl(student), reverse_kl(workhorse.load(run).reference)
    assert after < 0.8 * before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollouts": None}, "rollouts and the objective policy need each other"),
        (
            {"objective": {"kind": "next_token"}},
            "rollouts and the objective policy need each other",
        ),
        ({"steps": None, "minutes": 1.0}, "minutes=1 cannot be converted to steps with rollouts"),
        ({"batch_size": 6}, "batch_size=6 is not divisible by rollouts.completions=4"),
        ({"rollouts": {"reward": None}}, "the objective policy needs a rollouts.reward; set it"),
        ({"rollouts": {"completions": 1}}, "completions=1 leaves nothing to compare for"),
        (
            {
                "objective": {"kind": "distill", "teacher": "runs/teacher"},
                "rollouts": {"completions": 1},
            },
            "the objective distill takes no rollouts.reward; set it to null",
        ),
        (
            {"rollouts": {"reward": None, "credit": "token"}},
            "baseline and credit have no effect on reward=null",
        ),
        (
            {"objective": VALUES["objective"]},
            "objective.values replaces rollouts.baseline=group; set it to none",
        ),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**fields)


@pytest.mark.parametrize(
    "corpus",
    [
        {"kind": "text", "path": "texts.txt"},
        {"kind": "conversations", "path": "chats.jsonl", "rows": "pairs"},
        {"kind": "conversations", "path": "chats.jsonl", "rows": "labels"},
        {"kind": "conversations", "path": "chats.jsonl", "learn": "all"},
    ],
)
def test_data_without_right_answers_is_refused(corpus: dict[str, Any]) -> None:
    fields = recipe().to_dict()
    fields["data"] = {"corpus": corpus, "packing": "padded"}
    with pytest.raises(ConfigError, match="corpus has no prompts with a right answer"):
        Recipe.from_dict(fields)


def test_a_missing_reward_is_found_by_a_dry_run() -> None:
    with pytest.raises(ConfigError, match=r"none\.py is not a file"):
        estimate(recipe(rollouts={"reward": {"kind": "python", "path": "none.py"}}))


def test_a_value_head_has_no_optimizer_state_in_init() -> None:
    fields = {**recipe(**VALUES).to_dict(), "init": "runs/other", "init_optimizer": True}
    fields["model"] |= {"vocab_size": 300, "max_seq_len": 20}
    with pytest.raises(ConfigError, match=r"init_optimizer=true does not fit objective\.values"):
        Recipe.from_dict(fields)
