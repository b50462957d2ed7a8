"""The folder of a study: its definition, its trials (training runs) and its results.

study.yaml      the study, with the fields of its base recipe and all variants
timings.json    seconds per step of each variant, if the budget is in seconds
data/           tokenizers and token shards, shared by all trials
trials/VARIANT/seed-N/      run directory of a trial; a finished trial has its outcome in trial.json
trials/VARIANT/rate-F/      run directory of a trial of the learning rate search, for the factor F
results.json, report.md, report.html
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from workhorse.checkpoints.runs.run_directory import FolderLock
from workhorse.compare.plan import Measure, Trial
from workhorse.compare.study import Study
from workhorse.config.base import Config, ConfigError, read_yaml
from workhorse.config.errors import as_written
from workhorse.config.overrides import differences
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import read_json, write_yaml
from workhorse.files.writing import write_atomically, writing

NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]

FOR_PEOPLE = ("name", "description")
"""Keys of the base recipe that do not affect training."""

COSTS = ("seconds", "tokens_per_second", "peak_memory")
"""Fields of a trial's outcome that depend on the machine and its load."""


class Losses(Config):
    """A held-out loss in two units: nats per token, and bits per byte."""

    loss: NotNegative
    bits_per_byte: NotNegative


class Outcome(Config):
    """The outcome of a finished trial: the fields of its `trial.json`."""

    loss: NotNegative | None
    bits_per_byte: NotNegative | None
    unknown_rate: NotNegative | None
    diverged: str | None
    """Error message if the trial diverged, otherwise None. The losses of a diverged trial are
    None."""
    steps: Count
    tokens: Count
    skipped_steps: Count
    parameters: Count
    flops_per_token: Count
    device: str
    threads: Count
    versions: dict[str, str]
    seconds: NotNegative
    tokens_per_second: NotNegative | None
    peak_memory: Count | None
    by_context: dict[str, Losses]
    """The losses at each context length of the study, by length; empty if the trial diverged."""

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if self.diverged is None and (self.loss is None or self.bits_per_byte is None):
            raise ConfigError("a loss is missing, and diverged is not set")
        return self

    def measured(self, measure: Measure) -> float | None:
        """The held-out loss in the unit of `measure`; None if the trial diverged."""
        return self.loss if measure == "loss" else self.bits_per_byte


class StudyFolder:
    """The folder of one study. Creating this object neither reads nor writes files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.study_file = self.path / "study.yaml"
        self.timings_file = self.path / "timings.json"
        self.data = self.path / "data"
        self.results_file = self.path / "results.json"
        self.report_file = self.path / "report.html"
        self.text_file = self.path / "report.md"

    def check(self, study: Study) -> None:
        """Check that a study can start or resume in this folder. Writes nothing.

        Raises:
            WorkhorseError: the folder contains other files, or `study` differs from the study in
                it by more than added seeds and variants.
        """
        if self.path.exists() and not self.path.is_dir():
            raise WorkhorseError(f"{self.path} is not a folder; choose another --out")
        if not self.study_file.is_file():
            others = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
            others = [name for name in others if name != "data" and not name.startswith(".")]
            if others:
                raise WorkhorseError(
                    f"{self.path} is not empty and has no study.yaml (it has {min(others)!r}); "
                    "choose another --out"
                )
            return
        before = read_yaml(self.study_file)
        if not isinstance(before.get("seeds"), list) or not isinstance(
            before.get("variants"), dict
        ):
            raise WorkhorseError(
                f"{self.study_file} is damaged: seeds or variants are missing; restore it, or "
                "choose another --out"
            )
        change = _refused_change(before, identity(study))
        if change:
            raise WorkhorseError(
                f"{change} since {self.path} was started, but a started study may only get "
                "additional seeds and variants; undo the change, or choose another --out"
            )

    def begin(self, study: Study) -> None:
        """Create the folder if needed, and write `study.yaml`."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        text = write_yaml(identity(study))
        if not self.study_file.is_file() or self.study_file.read_text("utf-8") != text:
            write_atomically(self.study_file, text)

    def lock(self) -> FolderLock:
        """Lock the folder, to keep other processes from running this study.

        Raises:
            WorkhorseError: another process holds the lock.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.path)

    def trial(self, trial: Trial) -> Path:
        """The run directory of a trial."""
        return self.path / trial.folder

    def outcome(self, trial: Trial, contexts: Sequence[int]) -> Outcome | None:
        """The outcome of a trial; None if the trial is not finished.

        `contexts` are the study's context lengths, which the outcome must contain.

        Raises:
            WorkhorseError: the trial's `trial.json` is damaged.
        """
        file = outcome_file(self.trial(trial))
        if not file.is_file():
            return None
        try:
            found = Outcome.from_dict(read_json(file))
            if found.diverged is None and [*found.by_context] != [*map(str, contexts)]:
                raise ConfigError("the context lengths differ from the study's", "by_context")
            return found
        except WorkhorseError as error:
            raise WorkhorseError(
                f"{file} is damaged ({str(error).partition(';')[0]}); delete it and run the "
                "study again"
            ) from None

    def timings(self) -> dict[str, float]:
        """The measured seconds per training step of each variant, by name.

        Raises:
            WorkhorseError: `timings.json` is damaged.
        """
        if not self.timings_file.is_file():
            return {}
        found = read_json(self.timings_file)
        if not all(isinstance(value, float) and value > 0 for value in found.values()):
            raise WorkhorseError(
                f"{self.timings_file} is damaged: not all values are above 0; restore it, or "
                "choose another --out"
            )
        return found

    def save_timings(self, seconds: dict[str, float]) -> None:
        write_atomically(self.timings_file, json.dumps(seconds, indent=2) + "\n")


def outcome_file(run: Path) -> Path:
    """The path of `trial.json` in a trial's run directory."""
    return run / "trial.json"


def identity(study: Study) -> dict[str, Any]:
    """The contents of `study.yaml`: a study's question and all settings that its results depend on.

    `grid` is expanded to `variants`.
    """
    fields = study.to_dict()
    base = {key: value for key, value in fields["base"].items() if key not in FOR_PEOPLE}
    left_out = ("base", "variants", "grid", "quick")
    rest = {key: value for key, value in fields.items() if key not in left_out}
    rest["baseline"] = study.compared_with
    return {**rest, "variants": study.all_variants(), "base": base}


def _refused_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the first change of a study that prevents resuming it; empty if there is none.

    Seeds and variants may be added, and the question may change.
    """
    for seed in before["seeds"]:
        if seed not in now["seeds"]:
            return f"seed {seed} was removed from seeds"
    for name in before["variants"]:
        if name not in now["variants"]:
            return f"{name!r} was removed from variants"
    now = {
        **now,
        "question": before.get("question"),  # does not affect the trials
        "seeds": before["seeds"],
        "variants": {name: now["variants"][name] for name in before["variants"]},
    }
    for path, old, new in differences(before, now):
        return f"{'.'.join(path)} changed from {as_written(old)} to {as_written(new)}"
    return ""
