"""Losses and gradients equal those of TRL 1.16's trainers, on a small Llama in float32.

TRL's own methods compute its losses; only what they need of a trainer is set. Where it differs from
Workhorse by design, the test's docstring says how.
"""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.objectives.data import rows
from workhorse.checkpoints.stored import open_stored
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder
from workhorse.train.objectives.distill import Distill
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.objective import Objective
from workhorse.train.objectives.policy import PolicyBatch, PolicyConfig, advantages_of
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from workhorse.train.objectives.reward import RewardConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
VOCAB = 11


class Accelerator:
    """The collectives of one process."""

    device = torch.device("cpu")
    num_processes = 1
    is_main_process = True

    def same(self, x: Tensor, **_: object) -> Tensor:
        return x

    gather = gather_for_metrics = reduce = same

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def trainer(kind: type, model: nn.Module, **fields: object) -> Any:
    """A trainer of TRL without its constructor, which needs data and a tokenizer."""
    made = object.__new__(kind)
    defaults = {
        "model": model,
        "accelerator": Accelerator(),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in {**defaults, **fields}.items():
        setattr(made, name, value)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def theirs(folder) -> nn.Module:
    from transformers import LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(model, outputs=outputs)
    return model


@pytest.fixture
def ours(folder) -> Decoder:
    return open_stored(str(folder)).load_decoder(dtype=torch.float32).train()


def assert_equal(objective: Objective, batch: Batch, model: nn.Module, loss: Tensor) -> None:
    """Assert that losses, and gradients of the first, some middle and the last layer, are equal."""
    mine, count, _ = objective(batch)
    (mine / count).backward()
    loss.backward()
    assert (mine / count).item() == pytest.approx(loss.item(), abs=1e-5)
    weights = dict(objective.decoder.named_parameters())
    pairs = {
        "model.embed_tokens.weight": "embedding.tokens.weight",
        "model.layers.0.mlp.down_proj.weight": "layers.0.feed_forward.down_proj.weight",
        "model.layers.1.self_attn.o_proj.weight": "layers.1.attention.out_proj.weight",
        "lm_head.weight": "head.proj.weight",
    }
    gradients = {name: one.grad for name, one in model.named_parameters()}
    assert gradients["model.embed_tokens.weight"].abs().max() > 1e-3
    for name, own in pairs.items():
        if name in gradients:
            torch.testing.assert_close(weights[own].grad, gradients[name], atol=1e-5, rtol=1e-4)


def whole(batch: Batch) -> dict[str, Tensor]:
    """TRL's fields of rows: all tokens, and masks of tokens and of completions.

    The loss of a target is predicted at the position before it, so targets are shifted back.
    """
    last = torch.zeros(len(batch), 1, dtype=torch.int64)
    ids = torch.cat((batch.tokens, last), dim=1)
    learned = batch.targets != IGNORE
    ids[:, 1:] = batch.targets.where(learned, ids[:, 1:])
    mask = torch.cat((last, learned.long()), dim=1)
    used = mask.flip(1).cumsum(1).flip(1) > 0
    return {"input_ids": ids, "attention_mask": used.long(), "completion_mask": mask}


def in_halves(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """TRL has all chosen answers first, then all rejected ones."""
    return {name: torch.cat((one[0::2], one[1::2])) for name, one in fields.items()}


DPO = [
    (DpoConfig(), "sigmoid"),
    (DpoConfig(loss="hinge", beta=0.5), "hinge"),
    (DpoConfig(loss="ipo", per_token=True), "ipo"),
    (DpoConfig(loss="robust", label_smoothing=0.2), "robust"),
    (DpoConfig(per_token=True, beta=0.5), "sigmoid_norm"),
]


@pytest.mark.parametrize(("config", "name"), DPO)
def test_dpo(config: DpoConfig, name: str, ours: Decoder, theirs: nn.Module) -> None:
    """TRL's `sigmoid` ignores `label_smoothing`; its `ipo` always divides by the length.

    It counts lengths with the completion's first token, as the batch here has it too.
    """
    from trl import DPOTrainer

    batch = rows()
    fields = in_halves(whole(batch))
    fields |= {
        "ref_chosen_logps": batch.reference[0::2],
        "ref_rejected_logps": batch.reference[1::2],
    }
    dpo = trainer(
        DPOTrainer,
        theirs,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        use_weighting=False,
    )
    loss = dpo._compute_loss(theirs, fields, return_outputs=False)
    assert_equal(config.build(ours), batch, theirs, loss)


@pytest.mark.parametrize("kl", [True, False])
def test_kto(kl: bool, ours: Decoder, theirs: nn.Module) -> None:
    """For a given KL divergence. TRL estimates it from mismatched answers of the micro-batch."""
    from trl.trainer.kto_trainer import KTOTrainer

    batch = rows()
    config = KtoConfig(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, kl=kl)
    kto = trainer(
        KTOTrainer,
        theirs,
        calculate_KL=kl,
        precompute_ref_logps=True,
        loss_type="kto" if kl else "apo_zero_unpaired",
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    point = torch.full((8,), 1.7 if kl else 0.0)
    kto._compute_kl_logps = lambda model, batch: torch.zeros(8)
    fields = whole(batch) | {"label": batch.values > 0, "ref_logps": batch.reference}
    loss = kto._compute_loss(theirs, fields | {"ref_KL_logps": -point}, return_outputs=False)
    objective = config.build(ours)
    objective.point = float(point[0])
    assert_equal(objective, batch, theirs, loss)


def test_orpo_and_simpo(ours: Decoder, theirs: nn.Module) -> None:
    """TRL's ORPO averages the likelihood over the tokens of all chosen answers in a micro-batch.

    It also includes their prompts. Here, as in the paper, each pair has the mean over its answer.
    So only the terms of preference are compared.
    """
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    batch = rows()
    fields = in_halves(whole(batch))
    logits = theirs(fields["input_ids"]).logits
    labels = fields["input_ids"].masked_fill(fields["completion_mask"] == 0, -100)
    means = ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)
    chosen, rejected = means.chunk(2)
    orpo = trainer(ORPOTrainer, theirs, beta=0.2)
    loss = -orpo.odds_ratio_loss(chosen, rejected)[0].mean()
    objective = OrpoConfig(beta=0.2).build(ours)
    objective.sft_weight = 0.0
    assert_equal(objective, batch, theirs, loss)
    theirs.zero_grad()
    ours.zero_grad()
    logits = theirs(fields["input_ids"]).logits
    means = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)
    options = {"beta": 2.5, "simpo_gamma": 0.8, "loss_type": "simpo", "label_smoothing": 0.0}
    cpo = trainer(CPOTrainer, theirs, **options, alpha=0.0)
    loss = cpo.cpo_loss(*means.chunk(2))[0].mean()
    assert_equal(SimpoConfig(beta=2.5, gamma=0.8).build(ours), batch, theirs, loss)


def test_reward(folder, ours: Decoder) -> None:
    """Transformers' score head has the row of the token; it reads the last token that it is given.

    So it gets each answer without its last token, as the rows here.
    """
    from transformers import LlamaForSequenceClassification
    from trl import RewardTrainer

    model = LlamaForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, pad_token_id=0
    )
    with torch.no_grad():
        model.score.weight.copy_(ours.head.proj.weight[4:5])
    margins = torch.tensor([0.3, 0.0, 1.5, 0.2])
    batch = replace(rows(), values=margins.repeat_interleave(2))
    batch.tokens.clamp_(min=1)  # 0 is padding for transformers
    used = (batch.targets != IGNORE).flip(1).cumsum(1).flip(1) > 0
    fields = {"input_ids": batch.tokens.where(used, 0), "attention_mask": used.long()}
    args = SimpleNamespace(center_rewards_coefficient=0.01)
    reward = trainer(RewardTrainer, model, args=args)
    loss = reward.compute_loss(model, in_halves(fields) | {"margin": margins})
    objective = RewardConfig(token=4, centre=0.01).build(ours)
    assert_equal(objective, batch, model, loss)
    torch.testing.assert_close(ours.head.proj.weight.grad[4:5], model.score.weight.grad)


CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
GRPO: list[tuple[str, str, PolicyConfig]] = [
    ("grpo", "token", PolicyConfig(**CLIPS, denominator="sequences", kl_weight=0.04)),
    ("dapo", "token", PolicyConfig(**CLIPS)),
    ("bnpo", "token", PolicyConfig(**CLIPS)),
    ("dr_grpo", "token", PolicyConfig(**CLIPS, denominator="constant", max_length=8)),
    ("cispo", "token", PolicyConfig(clip="weight", clip_high=0.28)),
    ("grpo", "sequence", PolicyConfig(**CLIPS, ratio="sequence", denominator="sequences")),
    ("luspo", "sequence", PolicyConfig(**CLIPS, ratio="sequence", denominator="constant",
                                       max_length=1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "config"), GRPO)
def test_grpo(name: str, level: str, config: PolicyConfig, ours: Decoder, theirs: nn.Module):
    """All loss types, in one micro-batch.

    TRL's limit of CISPO is the largest ratio, here that minus 1.
    """
    from trl import GRPOTrainer

    generator = torch.Generator().manual_seed(3)
    batch = rows(group=4)
    batch.targets[:, 0] = batch.tokens[:, 1]
    learned = (batch.targets != IGNORE).flip(1).cumsum(1).flip(1) > 0
    batch.targets[learned] = torch.randint(VOCAB, (int(learned.sum()),), generator=generator)
    fields = whole(batch)
    batch = replace(batch, tokens=fields["input_ids"][:, :-1])
    counted = batch.targets != IGNORE
    now = theirs(batch.tokens).logits.log_softmax(-1).detach()
    now = now.gather(2, batch.targets.where(counted, 0)[..., None])[..., 0]
    noise = torch.randn(2, *now.shape, generator=generator) / 2
    old, reference = now + noise[0], now + noise[1]
    advantages = torch.randn(8, generator=generator)
    high = 1.28 if name == "cispo" else 0.28
    grpo = trainer(
        GRPOTrainer,
        theirs,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        loss_type=name,
        epsilon_low=0.2,
        epsilon_high=high,
        beta=config.kl_weight,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        max_completion_length=8,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": fields["input_ids"][:, :1],
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": fields["input_ids"][:, 1:],
        "completion_mask": counted.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": counted.sum(),
    }
    loss = grpo._compute_loss(theirs, inputs)
    rollouts = PolicyBatch(
        **vars(batch), old_logprobs=old, advantages=advantages, reference_tokens=reference
    )
    assert_equal(config.build(ours), rollouts, theirs, loss)


@pytest.mark.parametrize("dft", [False, True])
def test_sft_and_dynamic_fine_tuning(dft: bool, ours: Decoder, theirs: nn.Module) -> None:
    """With the log-probabilities of TRL's head, reduced as in `SFTTrainer.compute_loss`."""
    batch = rows()
    fields = whole(batch)
    labels = fields["input_ids"].masked_fill(fields["completion_mask"] == 0, -100)
    inputs = {"input_ids": fields["input_ids"], "attention_mask": fields["attention_mask"]}
    outputs = theirs(**inputs, labels=labels, fused_lm_head=True)
    losses = -outputs.log_probs * (outputs.log_probs.exp().detach() if dft else 1)
    loss = losses.sum() / outputs.label_mask.sum()
    objective = NextTokenConfig(dft=dft).build(ours)
    torch.testing.assert_close(objective(batch).figures["loss"], -outputs.log_probs.sum().detach())
    assert_equal(objective, batch, theirs, loss)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta: float, folder, ours: Decoder, theirs: nn.Module) -> None:
    from trl.experimental.gkd import GKDTrainer

    batch = rows()
    teacher = open_stored(str(folder)).load_decoder(dtype=torch.float32)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    logits = teacher(batch.tokens)
    student = theirs(batch.tokens).logits
    loss = GKDTrainer.generalized_jsd_loss(
        student, logits, labels=batch.targets, beta=beta,
        num_items_in_batch=(batch.targets != IGNORE).sum(),
    )  # fmt: skip
    assert_equal(Distill(ours, teacher, beta), batch, theirs, loss)


def test_advantages_of_groups() -> None:
    """The standard deviation of a group, as `GRPOTrainer` and `RLOOTrainer` compute it."""
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(1))
    grouped = rewards.view(-1, 4)
    deviation = grouped.std(dim=1, keepdim=True)
    expected = (grouped - grouped.mean(dim=1, keepdim=True)) / (deviation + 1e-4)
    group = torch.arange(8) // 4
    torch.testing.assert_close(advantages_of(rewards, group, "group_std"), expected.flatten())
    others = (grouped.sum(dim=1, keepdim=True) - grouped) / 3
    expected = (grouped - others).flatten()
    torch.testing.assert_close(advantages_of(rewards, group, "leave_one_out"), expected)
