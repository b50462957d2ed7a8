"""Rewards of completions: comparison with an answer, or a Python function of the user.

A function is called with three lists of strings, the prompts, completions and answers of a batch,
and returns one number for each completion. It runs in another process with a time limit.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from workhorse.child_process import ChildProcess, NoAnswerError
from workhorse.config.base import Config, ConfigError
from workhorse.data.tasks import reaches, similarity
from workhorse.errors import LARGEST, WorkhorseError, is_usable, shown


class Reward(Protocol):
    """Scores the completions of a batch."""

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
    ) -> list[float]:
        """Return one number per completion; higher is better."""
        ...


class RewardConfig(Config):
    """Base class of the options of a reward."""

    def fingerprint(self) -> str | None:
        """The SHA-256 of the file that the reward is read from; None without one."""
        return None

    @abstractmethod
    def build(self) -> Reward:
        """Create the reward.

        Raises:
            ConfigError: its file is missing.
        """


class AnswerRewardConfig(RewardConfig):
    """Comparison with the answer in the data.

    Whitespace before a completion is ignored, but not after it: the model would learn to fill the
    rest of a completion with spaces instead of ending it.
    """

    kind: Literal["answer"] = "answer"
    partial: bool = False
    """False: 1 for the exact answer, else 0. True: the fraction of equal positions."""

    def build(self) -> Reward:
        score: Callable[[str, str], float] = similarity if self.partial else _is_equal
        return lambda prompts, completions, answers: [
            score(completion.lstrip(), answer.strip())
            for completion, answer in zip(completions, answers, strict=True)
        ]


class CountdownRewardConfig(RewardConfig):
    """Evaluation of the expression for a `countdown` task; see `workhorse.data.tasks.reaches`."""

    kind: Literal["countdown"] = "countdown"

    def build(self) -> Reward:
        return lambda prompts, completions, answers: [
            reaches(prompt, completion.strip())
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


class PythonRewardConfig(RewardConfig):
    """A Python function; see `workhorse.train.rewards`."""

    kind: Literal["python"] = "python"
    path: Path
    """The file with the function, which is imported in another process."""
    function: str = "reward"
    """Name of the function."""
    seconds: float = Field(default=60.0, gt=0, le=86400)
    """Time limit of a call, for a whole batch."""

    def fingerprint(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def build(self) -> Reward:
        if not self.path.is_file():
            raise ConfigError(f"{self.path} is not a file; check the path", "train.rollouts.reward")
        return PythonReward(self)


AnyReward = Annotated[
    AnswerRewardConfig | CountdownRewardConfig | PythonRewardConfig, Field(discriminator="kind")
]


def _is_equal(completion: str, answer: str) -> float:
    return float(completion == answer)


class PythonReward:
    """Calls a function of the user in another process, which is started by the first call.

    Args:
        config: the file, the name of the function, and the time limit.
    """

    def __init__(self, config: PythonRewardConfig) -> None:
        self.config = config
        program = Path(__file__).with_name("reward_process.py")
        self._process = ChildProcess(program, config.path, config.function, seconds=config.seconds)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
    ) -> list[float]:
        """Return the rewards.

        Raises:
            WorkhorseError: the function does not exist, raises an error, exceeds the time limit, or
                does not return one finite number per completion, or one above `LARGEST`.
        """
        rewards = self._rewards([[*prompts], [*completions], [*answers]])
        if len(rewards) != len(completions):
            raise WorkhorseError(
                f"{self._name} returned {shown(rewards)} for {len(completions)} completions; "
                "return one number for each"
            )
        for reward in rewards:
            if not is_usable(reward):
                raise WorkhorseError(
                    f"{self._name} returned {shown(reward)}; return finite numbers, up to "
                    f"{LARGEST:g}"
                )
        return [float(reward) for reward in rewards]

    def check(self) -> None:
        """Import the function without calling it.

        Raises:
            WorkhorseError: the file cannot be imported, or does not have the function.
        """
        self._rewards([])

    @property
    def _name(self) -> str:
        return f"the reward function {self.config.path}:{self.config.function}"

    def _rewards(self, columns: list[list[str]]) -> list[Any]:
        """Return what the function returns for these arguments, `[]` without arguments."""
        try:
            reply = self._process.ask(columns)
        except NoAnswerError as error:
            raise WorkhorseError(
                f"{self._name} did not return: its process {error}; correct it, or raise "
                "train.rollouts.reward.seconds"
            ) from None
        if "error" in reply:
            raise WorkhorseError(f"{self._name} raised {reply['error']}; correct it")
        if "type" in reply:
            raise WorkhorseError(
                f"{self._name} returned a {reply['type']}; return a list with one number for each "
                "completion"
            )
        return reply["rewards"]

    def close(self) -> None:
        """End the process. It also ends when this object is deleted."""
        self._process.close()
