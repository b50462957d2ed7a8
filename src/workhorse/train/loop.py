"""The training loop: steps over batches, with validations, samples, checkpoints and clean stops.

The loop accesses no parameters and no files itself. Step, batches and store are passed in, so each
can be replaced without changing the loop.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from workhorse.checkpoints import MODEL, OPTIMIZER, Checkpoint
from workhorse.checkpoints.runs.store import CheckpointStore
from workhorse.data import IGNORE, Batch, Batches
from workhorse.devices.memory import peak_memory
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import Slices, whole
from workhorse.parallel.division.parts import own_slices
from workhorse.parallel.processes.world import ALONE, World
from workhorse.train.randomness import random_state, set_random_state
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import Event, MetricsFile
from workhorse.train.rollouts import Rollouts
from workhorse.train.saver import Saver
from workhorse.train.speed import Peak
from workhorse.train.step.step import StepResult, TrainingStep
from workhorse.train.validation import Validation

STOPPING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Signals that stop training. They are selected by name because Windows has no SIGHUP."""


class StopSignals:
    """Context manager that records the first SIGINT, SIGTERM or SIGHUP instead of exiting.

    SIGHUP reports that the terminal was closed; it stays ignored under `nohup`. The first signal
    restores the previous handlers, so a second one takes effect at once. Outside the main thread no
    signal is recorded, because Python calls signal handlers only in the main thread. The context is
    reentrant.

    Args:
        numbers: the signals to record.

    Attributes:
        received: the first signal received, or None. It is kept after the context ends.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = STOPPING) -> None:
        self.received: signal.Signals | None = None
        self._numbers = numbers
        self._depth = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()


TensorsOf = Callable[[], dict[str, Tensor]]


class DivergedError(WorkhorseError):
    """Loss or gradient was not finite for too many steps in a row."""


@dataclass
class Counters:
    """Progress of a run."""

    step: int = 0
    """Steps done, including skipped ones."""
    rows: int = 0
    """Rows (training sequences) read from the data, or skipped after a loss spike."""
    tokens: int = 0
    """Number of predicted tokens trained on."""
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite. They left the weights unchanged."""
    bad_in_a_row: int = 0
    jumps_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps that were not spikes, up to `train.loss_spikes.window` losses."""
    times_back: int = 0
    """Number of times that the run has returned to a checkpoint because of a loss spike."""
    seconds: float = 0.0
    """Time in the loop over all sessions, including validation and checkpoints."""


SHOWN_TIMES = 100
"""The rollouts of about this number of logged steps are stored with the metrics of a run."""


class _Mark(NamedTuple):
    """State of the loop when it last logged."""

    time: float
    """Value of `time.perf_counter` then, plus the later time of validation and saving, which does
    not count as training time."""
    step: int
    tokens: int
    pass_seconds: float


@dataclass
class Loop:
    """The training loop of one run. It starts at the step in `counters`.

    Attributes:
        config: the training settings: number of steps, intervals of logs, checkpoints and others.
        step: the training step.
        weights: function that returns the weights to save.
        batches: the batches, indexed by step.
        validate: function that measures the loss on a number of validation rows (None: all rows).
            `validate` itself is None if the run has no validation data.
        sample: function that generates the samples; None for no samples.
        store: the checkpoint store.
        metrics: the file of events.
        on_event: called with every event.
        identity: values that identify the run, such as the recipe; every checkpoint stores them.
        flops_per_token: floating-point operations of training, per token.
        peak: the peak floating-point operations per second of the device.
        check_place: function that raises an error if the run's folder was moved or removed.
        world: the processes of the run; rank 0 writes files and events.
        look_first: True to validate and to generate samples also before the first step.
    """

    config: TrainConfig
    step: TrainingStep
    weights: TensorsOf
    batches: Batches | Rollouts
    validate: Callable[[int | None], Validation] | None
    sample: Callable[[], list[dict[str, str]]] | None
    store: CheckpointStore
    metrics: MetricsFile
    on_event: Callable[[Event], None]
    identity: dict[str, Any]
    flops_per_token: int
    peak: Peak
    check_place: Callable[[], None]
    world: World = ALONE
    look_first: bool = False
    counters: Counters = field(default_factory=Counters)
    saved: int = 0
    """Number of steps done when the newest checkpoint was saved."""
    _consistent: bool = True
    """True if weights, optimizer and counters belong to the same step. False during an update."""

    def __post_init__(self) -> None:
        own: Callable[[Mapping[str, Tensor]], Slices] = whole
        world = ALONE
        if self.world.lockstep:
            world = self.world
            own = partial(own_slices, rank=world.rank, part=self.step.optimizer.masters.part)
        self._rates = self.config.optimizer.rates()
        self._saver = Saver(self.store, self._saved, world, own)

    def restore(self, checkpoint: Checkpoint, rows: int) -> None:
        """Restore optimizer, loss scale, counters and random state from a checkpoint.

        The caller loads the weights. The next step is then the same as in an uninterrupted run.
        `rows` is the number of rows (training sequences) of the data that count as read.
        """
        self.step.optimizer.load(checkpoint.optimizer)
        self.step.scale.load(checkpoint.state["loss_scale"])
        self.step.objective.load(checkpoint.state.get("objective", {}))
        self.counters = Counters(**{**checkpoint.state["counters"], "rows": rows})
        if self.counters.bad_in_a_row >= self.config.max_bad_steps:
            self.counters.bad_in_a_row = 0  # the run stopped because of these; allow new ones
        set_random_state(checkpoint.state["random"])

    def run(self, signals: StopSignals, progress: Callable[[], None] = lambda: None) -> bool:
        """Train until the last step or a signal, then save a checkpoint.

        A checkpoint is also saved if something other than a training step fails, such as
        validation, sampling or a function that is called with events. `progress` is called after
        every step.

        Returns:
            True after the last step or a signal; False after a loss spike.

        Raises:
            DivergedError: too many steps in a row were not finite.
            WorkhorseError: the disk cannot be written.
        """
        self.saved = self.counters.step
        try:
            reached_end = self._train(signals, progress)
        except Exception:
            if self._saver.failed:
                self.check_place()  # its error may explain the failed save
            with contextlib.suppress(Exception):  # the first failure is the one to report
                # with sharded weights the other ranks would have to save too
                alone = self._consistent and not self.world.lockstep
                if alone and not self._saver.failed and self.saved != self.counters.step:
                    self.save()
                self._saver.wait()
            raise
        except KeyboardInterrupt:
            # Python waits for the writing thread at exit anyway
            with contextlib.suppress(WorkhorseError):
                self._saver.wait()
            raise
        if not reached_end:
            return False
        reason = signals.received.name if signals.received else "finished"
        peaks = self.world.gather(torch.tensor(peak_memory(self.step.device)))
        self.notify(
            "end",
            reason=reason,
            time=time.time(),
            tokens=self.counters.tokens,
            seconds=self.counters.seconds,
            peak_memory=peaks.tolist(),
        )
        return True

    def _train(self, signals: StopSignals, progress: Callable[[], None]) -> bool:
        config, counters = self.config, self.counters
        started = time.perf_counter() - counters.seconds
        if self.look_first and counters.step == 0:
            self._look(ended=False)
        mark = self._mark()
        of_processes: dict[str, list[float]] = {}
        warming_up = True  # the first step of a session waits for compilation and page faults
        batch: Batch | None = None
        while counters.step < config.length and not self._is_to_stop(signals):
            batch = batch or self._read(counters.step)
            assert batch is not None
            loss, counted = self.step.backward(batch, counters.step)
            predicted = int((batch.targets != IGNORE).sum())
            following = counters.step + 1
            # While a GPU computes; only `update` waits for it.
            batch = self._read(following) if self.batches.ahead else None
            schedule = config.schedule.factor(counters.step, config.length)
            ended = following == config.length
            logs = following % config.log_every == 0 or ended
            if logs:
                # before the update, so that no collective can fail between the update and the
                # step's line in the log
                own = (self.step.pass_seconds - mark.pass_seconds) / (following - mark.step)
                of_processes = self._of_processes(own)
            self._consistent = False
            result = self.step.update(loss, counted, schedule)
            counters.step = following
            counters.rows += config.batch_size
            self._count(result, predicted)
            self._consistent = True
            counters.seconds = time.perf_counter() - started
            if logs:
                last, mark = mark, self._mark()
                rate = (mark.tokens - last.tokens) / (mark.time - last.time)
                self._log(result, schedule, rate, of_processes, warming_up=warming_up)
            elif warming_up:  # the speed does not include this step
                mark = mark._replace(time=time.perf_counter(), tokens=counters.tokens)
            warming_up = False
            progress()
            if self._has_jumped():
                self._saver.wait()
                return False
            pause = time.perf_counter()
            self._look(ended)
            self._saver.look()
            if following % config.checkpoint_every == 0 and not (ended or counters.jumps_in_a_row):
                self.save()
            # the speed does not include validation and saving
            mark = mark._replace(time=mark.time + time.perf_counter() - pause)
            counters.seconds = time.perf_counter() - started
        if self.saved != counters.step:
            self.save()
        self._saver.wait()
        return True

    def _mark(self) -> _Mark:
        counters = self.counters
        return _Mark(time.perf_counter(), counters.step, counters.tokens, self.step.pass_seconds)

    def _has_jumped(self) -> bool:
        """Return True if enough spikes in a row require a return to the last checkpoint."""
        loss_spikes, counters = self.config.loss_spikes, self.counters
        return loss_spikes is not None and counters.jumps_in_a_row >= loss_spikes.in_a_row

    def _is_to_stop(self, signals: StopSignals) -> bool:
        """Return True if any rank has received a signal; all then stop after the same step."""
        number = self.world.most(signals.received or 0)
        if number:
            signals.received = Signals(number)
        return bool(number)

    def save(self) -> None:
        """Wait until all metrics so far are on disk, then start to write a checkpoint."""
        self.saved = self.counters.step  # also if it fails: a failed save is not repeated
        self._saver.wait()
        if self.world.is_first:
            self.check_place()
            self.metrics.sync()
        elif not self.world.lockstep:
            return
        state = {
            **self.identity,
            "counters": asdict(self.counters),
            "loss_scale": self.step.scale.state(),
            "objective": self.step.objective.state(),
            "random": random_state(),
        }
        tensors = {MODEL: self.weights, OPTIMIZER: self.step.optimizer.tensors}
        self._saver.save(self.counters.step, tensors, state)

    def _read(self, step: int) -> Batch | None:
        """Return the batch of a step, in pinned memory for CUDA; None after the last step."""
        if step >= self.config.length:
            return None
        batch = self.batches[step]
        return batch.pinned() if self.step.device.type == "cuda" else batch

    def _count(self, result: StepResult, predicted: int) -> None:
        counters = self.counters
        counters.tokens += predicted
        if result.finite:
            counters.bad_in_a_row = 0
            self._compare(result.loss)
            return
        counters.skipped_steps += 1
        counters.bad_in_a_row += 1
        self.notify("skipped_step", loss=result.loss, grad_norm=result.grad_norm)
        if counters.bad_in_a_row >= self.config.max_bad_steps:
            go_on = (
                "resume from the last checkpoint with --resume"
                if self.saved
                else "no checkpoint has been saved yet: restart"
            )
            often = counters.bad_in_a_row
            when = f"for {often} steps in a row, up to" if often > 1 else "at"
            raise DivergedError(
                f"loss or gradient was not finite {when} step {counters.step} "
                f"(loss {result.loss:g}, gradient norm {result.grad_norm:g}); {go_on} with a lower "
                "learning rate, a longer warm-up or a wider dtype"
            )

    def _compare(self, loss: float) -> None:
        """Count a loss as a spike, or add it to the losses that later ones are compared with."""
        loss_spikes, counters = self.config.loss_spikes, self.counters
        if loss_spikes is None:
            return
        if loss_spikes.is_spike(loss, counters.losses):
            counters.jumps_in_a_row += 1
        else:
            counters.jumps_in_a_row = 0
            counters.losses = [*counters.losses, loss][-loss_spikes.window :]

    def _of_processes(self, seconds: float) -> dict[str, list[float]]:
        """Gather each rank's seconds in passes per step; empty for one process."""
        if self.world.size == 1:
            return {}
        return {"pass_seconds": self.world.gather(torch.tensor(seconds)).tolist()}

    def _log(
        self,
        result: StepResult,
        schedule: float,
        tokens_per_second: float,
        of_processes: dict[str, list[float]],
        *,
        warming_up: bool,
    ) -> None:
        self.notify(
            "step",
            loss=result.loss,
            **result.terms,
            **self.step.objective.state_of_update(),
            **self.batches.figures,
            **{rate.setting: rate.value * schedule for rate in self._rates},
            grad_norm=result.grad_norm,
            tokens=self.counters.tokens,
            tokens_per_second=tokens_per_second,
            warming_up=warming_up,
            peak_fraction=self.peak.fraction(tokens_per_second * self.flops_per_token),
            skipped_steps=self.counters.skipped_steps,
            seconds=self.counters.seconds,
            memory=peak_memory(self.step.device),
            **of_processes,
        )
        step, length = self.counters.step, self.config.length
        since = (step - 1) % max(1, length // SHOWN_TIMES)
        if self.batches.shown and (since < self.config.log_every or step == length):
            self.notify("rollouts", rollouts=self.batches.shown)

    def _look(self, ended: bool) -> None:
        """Validate and generate samples when they are due."""
        config, step = self.config, self.counters.step
        every = config.steps_between_validations
        if self.validate is not None and (ended or (every and step % every == 0)):
            measured = asdict(self.validate(None if ended else config.rows_in_validation))
            self.notify("validation", **measured.pop("figures"), **measured)
        samples = config.samples
        if self.sample and samples and (ended or step % samples.every == 0):
            self.notify("samples", samples=self.sample())

    def _saved(self, step: int, path: Path) -> None:
        self.notify("checkpoint", step=step, path=str(path))
        while self.store.remarks:
            self.on_event({"kind": "notice", "message": self.store.remarks.pop(0)})

    def notify(self, kind: str, **values: Any) -> None:
        """Write an event to the metrics file and pass it to `on_event`; only rank 0 does so."""
        if not self.world.is_first:
            return
        event = {"kind": kind, "step": self.counters.step, **values}
        self.metrics.write(event)
        self.on_event(event)
