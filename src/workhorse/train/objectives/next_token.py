"""The objective of language modelling: cross-entropy of the next token, also of conversations."""

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from workhorse.config.base import ConfigError, OnResume
from workhorse.data import Batch
from workhorse.nn import Decoder, HeadLoss, TokenLogprobs
from workhorse.nn.logprobs import Logprobs, is_linear, shaping_of
from workhorse.nn.products import widened
from workhorse.train.objectives.objective import (
    ModelObjective,
    ObjectiveConfig,
    Outcome,
    Team,
    Weight,
    target_weights,
)


class NextTokenConfig(ObjectiveConfig):
    """The cross-entropy of the next token, weighted if the data has weights.

    With conversations this is supervised fine-tuning (SFT): only their learned tokens have a
    weight. The denominator is the sum of the weights in the whole batch.
    """

    kind: Literal["next_token"] = "next_token"
    loss_unit = "nats per token"
    z_loss: Weight = 0.0
    """Weight of the z-loss, the squared log-partition function (PaLM, 2204.02311 §5), which is
    added to the loss. The reported loss is the cross-entropy without it."""
    dft: bool = False
    """Multiply the loss of each token by its probability, without a gradient through the factor:
    dynamic fine-tuning (2508.05629). The reported loss is the cross-entropy."""
    label_smoothing: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0, lt=1)
    """Probability ε of the target distribution that is divided equally among all tokens
    (1512.00567 §7; 0.1 in 1706.03762). The reported loss is the cross-entropy."""

    def model_post_init(self, _context: object) -> None:
        if self.dft and self.label_smoothing:
            raise ConfigError("label_smoothing has no effect with dft=true; remove it")

    @property
    def needs_all_logits(self) -> str:
        return f"label_smoothing={self.label_smoothing}" if self.label_smoothing else ""

    def build(self, decoder: Decoder, team: Team = None) -> "NextToken | TokenLoss":
        if self.label_smoothing:
            return LabelSmoothing(decoder, self.label_smoothing, self.z_loss, team)
        return (DynamicFineTuning if self.dft else NextToken)(decoder, self.z_loss, team)


class NextToken(ModelObjective):
    """`Σ -log p(target)` over all targets, in nats, plus the z-loss during training.

    Args:
        decoder: the model to train.
        z_loss: weight of the z-loss, see `next_token_loss`; the z-loss is logged unless this is 0.
        team: see `Team`.
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0, team: Team = None) -> None:
        super().__init__(decoder, HeadLoss(), team)
        self.z_loss = z_loss

    def forward(self, batch: Batch) -> Outcome:
        z_loss = self.z_loss if self.training else 0.0
        losses, count = self.score(batch, z_loss=z_loss, weights=batch.weights)
        cross_entropy, z = losses.detach().unbind()
        figures = {"loss": cross_entropy} | ({"z_loss": z} if z_loss else {})
        return Outcome(losses.sum(), count, figures)


class TokenLoss(ModelObjective):
    """Base class of losses that replace the cross-entropy of each token, which is still reported.

    The arguments are as for `NextToken`. The z-loss is added to the loss.
    """

    figure: ClassVar[str]
    """The name under which the loss is logged, without the z-loss."""

    def __init__(self, decoder: Decoder, z_loss: float = 0.0, team: Team = None) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.z_loss = z_loss

    @abstractmethod
    def losses(self, x: Tensor, scores: Logprobs) -> Tensor:
        """Compute the loss of each target, (batch, seq); `x` is the input of the head."""

    def forward(self, batch: Batch) -> Outcome:
        x, scores = self.hidden_and_score(batch)
        weights = target_weights(batch)
        z_loss = self.z_loss if self.training else 0.0
        losses = (self.losses(x, scores) * weights).sum()
        z = z_loss * (scores.logsumexp.square() * weights).sum()
        cross_entropy = -(scores.target.detach() * weights).sum()
        figures = {"loss": cross_entropy, self.figure: losses.detach()}
        figures |= {"z_loss": z.detach()} if z_loss else {}
        return Outcome(losses + z, self.count(batch), figures)


class DynamicFineTuning(TokenLoss):
    """`-p(target) · log p(target)`, in nats, where the factor p has no gradient (2508.05629)."""

    figure = "dft_loss"

    def losses(self, x: Tensor, scores: Logprobs) -> Tensor:
        return -scores.target * scores.target.detach().exp()


class LabelSmoothing(TokenLoss):
    """`-(1 - ε) · log p(target) - ε · mean(log p)`, in nats; the mean is over the vocabulary."""

    figure = "smoothed_loss"

    def __init__(self, decoder: Decoder, epsilon: float, z_loss: float, team: Team) -> None:
        super().__init__(decoder, z_loss, team)
        if shaping_of(decoder.head).cap is not None:
            raise ConfigError("label_smoothing needs a head without cap; set model.head.cap=null")
        if not is_linear(decoder.head):
            raise ConfigError(
                "label_smoothing needs a head without update; remove the head from adapter.targets"
            )
        self.epsilon = epsilon

    def losses(self, x: Tensor, scores: Logprobs) -> Tensor:
        head = self.decoder.head
        row = widened(head.proj.weight).mean(dim=0)  # its logit is the mean of all logits
        mean = (widened(self.logprobs.read(x, head)) * row).sum(dim=-1)
        mean = mean if head.proj.bias is None else mean + widened(head.proj.bias).mean()
        of_all = scores.logsumexp - head.multiply(mean)
        return self.epsilon * of_all - (1 - self.epsilon) * scores.target
