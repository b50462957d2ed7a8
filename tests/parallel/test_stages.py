"""Pipelines: the order of passes, and the layers of a stage."""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.nn.grid import COVERING
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.stages import Pipeline, Turn, one_forward_one_backward
from workhorse.parallel.division.teams import Teams, absent_teams
from workhorse.parallel.processes.group import AbsentGroup


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_stage_waits_for_what_waits_for_it(stages: int, micro_batches: int) -> None:
    """With equally long passes, the schedule is as long as 2104.04473 §2.2.1 gives."""
    turns = [list(one_forward_one_backward(micro_batches, stages, one)) for one in range(stages)]
    for stage, own in enumerate(turns):
        assert sorted(own) == [Turn(*one) for one in product(range(micro_batches), (False, True))]
        assert most_in_flight(own) == min(stages - stage, micro_batches)
    assert ticks(turns) == 2 * (micro_batches + stages - 1)


def most_in_flight(turns: Sequence[Turn]) -> int:
    now = most = 0
    for turn in turns:
        now += 1 if turn.forward else -1
        most = max(most, now)
    return most


def ticks(turns: list[list[Turn]]) -> int:
    """Length of the schedule if each pass takes one tick and waits for those that it needs."""
    done: dict[tuple[int, Turn], int] = {}
    left = [list(own) for own in turns]
    now = 0
    while any(left):
        now += 1
        for stage, own in enumerate(left):
            if own and all(done.get(one, now) < now for one in needed(stage, own[0], len(left))):
                done[stage, own.pop(0)] = now
        assert now < 10_000, "the stages wait for each other"
    return now


def needed(stage: int, turn: Turn, stages: int) -> list[tuple[int, Turn]]:
    if turn.forward:
        return [(stage - 1, turn)] if stage else []
    return [(stage + 1, turn)] if stage + 1 < stages else [(stage, Turn(turn.micro_batch, True))]


def test_stages_have_all_layers_once() -> None:
    """Five layers in three stages; a tied table is on the first and the last stage."""
    fields = COVERING[0].to_dict()
    fields |= {"n_layers": 5, "pattern": [next(iter(fields["blocks"]))]}
    fields["blocks"] = {name: fields["blocks"][name] for name in fields["pattern"]}
    for tied in (True, False):
        fields["head"] = {**fields["head"], "tied": tied}
        config = DecoderConfig.from_dict(fields)
        whole = dict(config.build(device="meta").named_parameters())
        names: list[str] = []
        for stage in range(3):
            teams = absent_teams(ParallelismConfig(pipeline=3), config.vocab_size, stage)
            names += dict(teams.build(config, "auto", "meta").named_parameters())
        assert len(names) == len(whole) + tied
        assert set(names) == whole.keys()


def test_a_stage_knows_its_place() -> None:
    teams = Teams(stages=Pipeline(AbsentGroup(1, 4)))
    assert teams.stages is not None
    assert list(teams.stages.own(10)) == [2, 3, 4]
