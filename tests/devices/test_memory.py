"""Free memory of a machine and of its control groups."""

from pathlib import Path

import pytest
import torch

from workhorse.devices.memory import check_fits, free_memory
from workhorse.errors import WorkhorseError

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal: 33554432 kB\nMemAvailable: 8388608 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, {})) == 8 * GIB


@pytest.mark.parametrize("group", ["/", "/user/job", "/host/path/that/is/not/mounted"])
def test_a_limit_of_a_container(tmp_path: Path, group: str) -> None:
    files = {
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert free_memory(machine(tmp_path, files)) == 2 * GIB


def test_the_tightest_of_nested_groups_and_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/memory.max": f"{2 * GIB}",
        "sys/fs/cgroup/user/memory.current": f"{GIB}",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": f"{GIB}",
    }
    assert free_memory(machine(tmp_path, files)) == GIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "7:cpu:/job\n9:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}",
    }
    assert free_memory(machine(tmp_path, files)) == 2 * GIB


def test_other_systems_do_not_say(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    check_fits(10**15, torch.device("cpu"), "it", "wait", root=tmp_path)


def test_what_does_not_fit_is_refused_and_swap_counts(tmp_path: Path) -> None:
    meminfo = "MemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n"
    root = machine(tmp_path, {"proc/meminfo": meminfo})
    check_fits(9 * GIB, torch.device("cpu"), "it", "wait", root=root)
    with pytest.raises(
        WorkhorseError, match=r"it needs 9\.1 GiB and 9\.0 GiB are free on cpu; wait"
    ):
        check_fits(9 * GIB + GIB // 10, torch.device("cpu"), "it", "wait", root=root)
    check_fits(10**15, torch.device("mps"), "it", "wait", root=root)
