"""Rewards: comparison with answers, and Python functions in another process."""

import gc
import os
import re
import time
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.train.rewards import (
    AnswerRewardConfig,
    CountdownRewardConfig,
    PythonReward,
    PythonRewardConfig,
)

ANSWERS = ["p", "p"], [" abc", "abd"], ["abc", "abc"]


def test_rewards_of_answers() -> None:
    assert AnswerRewardConfig().build()(*ANSWERS) == [1.0, 0.0]
    assert AnswerRewardConfig(partial=True).build()(*ANSWERS) == [1.0, pytest.approx(2 / 3)]
    padded = ["p"], ["abc "], ["abc"]  # the completion should end after "c"
    assert AnswerRewardConfig().build()(*padded) == [0.0]
    assert AnswerRewardConfig(partial=True).build()(*padded) == [3 / 4]
    made = CountdownRewardConfig().build()(["3 4 make 7="] * 2, ["4+3", "3-4"], ["", ""])
    assert made == [1.0, 0.1]


def reward(tmp_path: Path, body: str, seconds: float = 20) -> PythonReward:
    path = tmp_path / "rewards.py"
    path.write_text(body)
    made = PythonRewardConfig(path=path, seconds=seconds).build()
    assert isinstance(made, PythonReward)
    return made


def test_the_process_ends_with_the_reward(tmp_path: Path) -> None:
    """A program that trains many runs keeps no process of the finished ones."""
    made = reward(tmp_path, "import os\ndef reward(p, c, a):\n    return [os.getpid() for _ in p]")
    (pid,) = made(["a"], ["b"], ["c"])
    os.kill(int(pid), 0)  # it is running
    del made
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_python_function_scores_a_batch_and_may_print(tmp_path: Path) -> None:
    made = reward(
        tmp_path,
        "calls = []\n"
        "def reward(prompts, completions, answers):\n"
        "    print('scoring')\n"
        "    calls.append(1)\n"
        "    return [len(one) + len(calls) for one in completions]\n",
    )
    assert made(*ANSWERS) == [5.0, 4.0]
    assert made(*ANSWERS) == [6.0, 5.0]
    made.close()


@pytest.mark.parametrize(
    "rewards",
    [
        "[numpy.float32(0.5), numpy.bool_(True)]",
        "numpy.array([0.5, 1], numpy.float16)",
        "[torch.tensor(0.5), torch.tensor(1)]",
        "torch.tensor([0.5, 1.0])",
    ],
)
def test_rewards_may_be_numbers_of_numpy_and_torch(tmp_path: Path, rewards: str) -> None:
    made = reward(tmp_path, f"import numpy, torch\ndef reward(p, c, a):\n    return {rewards}")
    assert made(*ANSWERS) == [0.5, 1.0]
    made.close()


def test_the_file_of_a_function_is_a_module(tmp_path: Path) -> None:
    made = reward(
        tmp_path,
        "from __future__ import annotations\n"
        "import dataclasses, multiprocessing\n"
        "@dataclasses.dataclass\n"
        "class Score:\n"
        "    value: float\n"
        "def score(text):\n"
        "    return Score(len(text))\n"
        "def reward(prompts, completions, answers):\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        return [score.value for score in pool.map(score, completions)]\n",
    )
    assert made(["p", "p"], ["a", "ab"], ["a", "a"]) == [1.0, 2.0]
    made.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reward(p, c, a):\n    raise ValueError('no\\nscore')", "raised ValueError: no score"),
        (
            "def score(p, c, a):\n    return [0, 0]",
            "raised AttributeError: module '__reward__' has",
        ),
        ("def reward(p, c, a):\n    return [1]", "returned [1] for 2 completions"),
        (
            "def reward(p, c, a):\n    return [1, float('nan')]",
            "returned nan; return finite numbers",
        ),
        ("def reward(p, c, a):\n    return ['x', 1]", "returned 'x'; return finite numbers"),
        ("def reward(p, c, a):\n    return [1, 10**400]", "0…; return finite numbers, up to 1e+15"),
        ("def reward(p, c, a):\n    return [1, -1e39]", "returned -1e+39; return finite numbers"),
        ("def reward(p, c, a):\n    return None", "raised TypeError"),
        (
            "import numpy\ndef reward(p, c, a):\n    return numpy.ones((2, 3))",
            "raised ValueError: can only convert an array of size 1 to a Python scalar; correct",
        ),
        (
            "def reward(p, c, a):\n    return {1: 0.5, 2: 0.5}",
            "returned a dict; return a list with",
        ),
        ("def reward(p, c, a):\n    return '10'", "returned a str; return a list with one number"),
        ("def reward(p, c, a):\n    raise MemoryError", "raised MemoryError; correct it"),
        ("import os\ndef reward(p, c, a):\n    os._exit(3)", "did not return: its process ended;"),
        ("syntax error", "raised SyntaxError"),
    ],
)
def test_a_function_that_fails_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    made = reward(tmp_path, body)
    with pytest.raises(WorkhorseError, match=re.escape(message)) as raised:
        made(*ANSWERS)
    assert "rewards.py:reward" in str(raised.value)
    assert "\n" not in str(raised.value)
    made.close()


def test_a_function_that_hangs_is_stopped_and_can_be_called_again(tmp_path: Path) -> None:
    made = reward(
        tmp_path,
        "import time\n"
        "def reward(prompts, completions, answers):\n"
        "    if prompts[0] == 'p':\n"
        "        time.sleep(60)\n"
        "    return [1, 2]\n",
        seconds=3,
    )
    with pytest.raises(
        WorkhorseError, match="did not return: its process did not answer within 3 seconds"
    ):
        made(*ANSWERS)
    assert made(["q", "q"], *ANSWERS[1:]) == [1.0, 2.0]
    made.close()


@pytest.mark.parametrize(
    "body",
    [
        "def reward(p, c, a):\n    os.fork()\n    time.sleep(60)",
        "time.sleep(60)",  # the import hangs, and the request is larger than a pipe
    ],
)
def test_a_time_limit_holds(tmp_path: Path, body: str) -> None:
    """The run waits neither for a child of the function nor until a request is read."""
    made = reward(tmp_path, f"import os, time\n{body}", seconds=0.5)
    started = time.monotonic()
    with pytest.raises(WorkhorseError, match="did not answer within"):
        made(["p" * 2**17], ["c"], ["a"])
    assert time.monotonic() - started < 30


def test_ctrl_c_does_not_reach_the_function(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to a process group; the run is to end after its step."""
    body = "import os\ndef reward(p, c, a):\n    return [os.getpgid(0) for _ in p]"
    made = reward(tmp_path, body)
    assert made(*ANSWERS) != [os.getpgid(0)] * 2
    made.close()


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="is not a file; check the path"):
        PythonRewardConfig(path=tmp_path / "none.py").build()
