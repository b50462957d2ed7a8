"""Learning from rewards: rollouts, their log-probabilities, and exact resuming."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import MODEL
from tests.train.runs import assert_same_run
from workhorse.config.base import ConfigError
from workhorse.data import IGNORE, Batches, prepare, prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.execute.choose import decoding_body
from workhorse.nn import DecoderConfig
from workhorse.train import Recipe, read_metrics, train
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.rollouts import RolloutConfig, Rollouts, prompts_of


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
        decoding_body(decoder, wait=True).decoder,
        tokenizer,
        options,
        stop_tokens=(tokenizer.eos_id,) if tokenizer.eos_id is not None else (),
        reward=options.reward.build(),
        seed=3,
    )
    return made, decoder


def test_rows_keep_their_seeds_if_prompts_are_processed_together(tmp_path: Path) -> None:
    """Rows of one prompt are one request only if their seeds are consecutive."""
    made, _ = rollouts(tmp_path)
    asked = [prompts_of(made.prompts[0], made.tokenizer)[0]] * 4
    together = made.complete(asked, [1, 2, 50, 51])
    alone = [made.complete(asked[:1], [seed])[0] for seed in (1, 2, 50, 51)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in alone}) == 4


def test_the_rows_of_a_step(tmp_path: Path) -> None:
    made, decoder = rollouts(tmp_path)
    made.reward = lambda prompts, *_: [float(row in (1, 2)) for row in range(len(prompts))]
    batch = made[5]
    assert batch.old is not None
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


def test_rollouts_follow_the_weights(tmp_path: Path) -> None:
    made, decoder = rollouts(tmp_path)
    before = made[0]
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(2)
    assert made[0].targets.tolist() != before.targets.tolist()


def test_unfinished_completions_can_be_ignored(tmp_path: Path) -> None:
    made, _ = rollouts(tmp_path, keep_unfinished=False)
    batch = made[0]
    kept = (batch.targets != IGNORE).any(dim=1)
    assert int(kept.sum()) == round(8 * (1 - made.figures["unfinished"]))
    assert not kept.all()


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
    """It is the change of the reward by the token, less the mean at this position of the group."""
    made, _ = rollouts(tmp_path, credit="token")

    def score(text: str) -> float:
        return sum(ord(letter) % 5 for letter in text) / 4

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
        gains[row, : len(scores) - 1] = torch.tensor(scores).diff()
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
    settings, run = recipe(objective=objective, micro_batch_size=2), tmp_path / "resumed"
    train(settings, tmp_path / "whole")
    metrics = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    first, *_, last = [event["kl"] for event in metrics if event["kind"] == "step"]
    assert first == 0
    assert last > 1e-6
    shutil.copytree(tmp_path / "whole", run)
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    train(settings, run, resume=True)
    assert_same_run(tmp_path / "whole", run, step=4)
    shutil.rmtree(run / "reference")
    shutil.rmtree(max((run / "checkpoints").glob("*4")))
    with pytest.raises(WorkhorseError, match="reference is missing, the model that this run"):
        train(settings, run, resume=True)


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
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**fields)
