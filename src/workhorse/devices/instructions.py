"""The CPU instructions that native operators may use: by default all that the CPU has.

The environment variable `WORKHORSE_NATIVE` can select fewer instructions. It has no effect on
PyTorch's own operators, which use `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` instead.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import torch

from workhorse.errors import WorkhorseError, nearest

SWITCH = "WORKHORSE_NATIVE"
"""Environment variable that selects CPU instructions. 0: no native operators. A name in `LEVELS`:
only the instructions of that level. Unset, empty or 1: all instructions that the CPU has."""
NATIVE = ("-march=native",)
WIDENED = "-DWIDEN_BFLOAT16"
"""Compiler flag that makes native gemms convert bfloat16 to float32 before multiplication."""


class Level(NamedTuple):
    """A level of CPU instructions. It includes the instructions of all lower levels."""

    flags: tuple[str, ...]
    """Compiler flags that enable the instructions of the level."""
    adds: frozenset[str]
    """Instructions that this level adds to the next lower one, by PyTorch's names."""
    emulates: frozenset[str] = frozenset()
    """Instructions that our operators emulate in software if the CPU lacks them; for tests."""


_V4 = "-march=x86-64-v4"
_VNNI = (_V4, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
LEVELS: dict[str, Level] = {
    "x86-64-v2": Level(("-march=x86-64-v2",), frozenset({"ssse3", "sse4_1", "sse4_2", "popcnt"})),
    "x86-64-v3": Level(("-march=x86-64-v3",), frozenset({"avx", "avx2", "bmi2", "f16c", "fma3"})),
    "x86-64-v4": Level(
        (_V4,), frozenset({"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"})
    ),
    "avx512-vnni": Level(_VNNI, frozenset({"avx512_vnni"})),
    "avx512-bf16": Level(_BF16, frozenset({"avx512_bf16"})),
    "avx512-bf16-widened": Level((*_BF16, WIDENED), frozenset()),
    "amx-emulated": Level(
        (*_BF16, "-include", "simd/emulated_tiles.h"), frozenset(), frozenset({"amx_bf16"})
    ),
    "amx": Level(
        (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
    ),
}
"""Levels by name, from the lowest to the highest."""


def switched_off() -> bool:
    """True if native operators are disabled by `WORKHORSE_NATIVE=0`."""
    return os.environ.get(SWITCH) == "0"


def compiler_flags() -> tuple[str, ...]:
    """Compiler flags for the instructions that native operators may use.

    Raises:
        WorkhorseError: see `cpu_has`.
    """
    level = _level()
    if level is not None:
        return LEVELS[level].flags
    return (*NATIVE, WIDENED) if cpu_has("avx512_bf16") and widens() else NATIVE


def widens() -> bool:
    """True if native gemms convert bfloat16 to float32 before multiplication.

    This is the case without AVX512-BF16, and on Intel CPUs without AMX. On Intel CPUs a bfloat16
    multiplication of AVX512-BF16 takes as long as four in float32, on AMD CPUs as long as one. If
    `WORKHORSE_NATIVE` selects a level with AVX512-BF16, the level decides.

    Raises:
        WorkhorseError: see `cpu_has`.
    """
    if not cpu_has("avx512_bf16"):
        return True
    level = _level()
    if level is not None:
        return WIDENED in LEVELS[level].flags
    return cpuinfo_field("vendor_id") == "GenuineIntel" and not cpu_has("amx_bf16")


def cpu_has(instructions: str) -> bool:
    """True if native operators may use these instructions: CPU and selected level have them.

    Instructions have PyTorch's names, such as `avx512_bf16`.

    Raises:
        WorkhorseError: `WORKHORSE_NATIVE` is not a level that this CPU supports.
    """
    level = _level()
    if level is None:
        return instructions in _on_this_cpu()
    return instructions in LEVELS[level].emulates or instructions in _up_to(level)


def used() -> list[str]:
    """Names of all instructions that native operators may use, as in `cpu_has`.

    Raises:
        WorkhorseError: see `cpu_has`.
    """
    return [name for level in LEVELS.values() for name in sorted(level.adds) if cpu_has(name)]


def levels_here() -> list[str]:
    """Names of the levels that this CPU supports, from the lowest to the highest."""
    return [name for name in LEVELS if _up_to(name) <= _on_this_cpu()]


@functools.cache
def cpuinfo_field(*names: str) -> str:
    """Return the value of the first line of /proc/cpuinfo with one of these names, or ''."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def _level() -> str | None:
    """Name of the level in `WORKHORSE_NATIVE`; None if it selects all instructions or none."""
    asked = os.environ.get(SWITCH, "")
    return None if asked in ("", "0", "1") else _checked(asked)


@functools.cache
def _checked(name: str) -> str:
    if name not in LEVELS:
        raise WorkhorseError(
            f"{SWITCH}={name} is not a level of CPU instructions; {nearest(name, ['0', *LEVELS])}"
        )
    if name not in levels_here():
        known = ", ".join(levels_here())
        remedy = f"; choose one of {known}" if known else ", which supports no level; unset it"
        raise WorkhorseError(f"{SWITCH}={name} is not supported by this CPU{remedy}")
    return name


@functools.cache
def _up_to(level: str) -> frozenset[str]:
    """Names of the instructions of a level, including those of all lower levels."""
    names = list(LEVELS)
    return frozenset().union(*(LEVELS[name].adds for name in names[: names.index(level) + 1]))


@functools.cache
def _on_this_cpu() -> frozenset[str]:
    if not hasattr(torch.cpu, "get_capabilities"):  # missing in the oldest PyTorch we support
        return frozenset()
    return frozenset(name for name, there in torch.cpu.get_capabilities().items() if there is True)
