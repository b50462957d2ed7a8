"""What a preset states about a published model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

UNITS = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Preset:
    """One published model, as data.

    Attributes:
        name: the published one, in kebab case.
        make: builds the config; called when `config` is first accessed.
        parameters: exact parameter count of that config, a tied matrix counted once.
        exactness: where that count comes from. `released`: published code or weights determine it;
            `printed`: it follows from the shape printed in a paper; `derived`: from the shape of a
            part of a published model.
        printed: the count as the source prints it ("6.7B"), empty if it prints none.
        source: paper and table, or released config, that the shape was taken from.
        notes: where sources contradict each other, and what was chosen where they are silent.
        released: the fields of `config.json` that the config is read from, if it is.
    """

    name: str
    make: Callable[[], "DecoderConfig"]
    parameters: int
    exactness: Literal["released", "printed", "derived"]
    source: str
    printed: str = ""
    notes: tuple[str, ...] = ()
    released: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def config(self) -> "DecoderConfig":
        return self.make()

    @property
    def agrees(self) -> bool | None:
        """Whether the exact count rounds to the printed one; None if none is printed."""
        if not self.printed:
            return None
        low, high = rounding(self.printed)
        return low <= self.parameters <= high


def rounding(printed: str) -> tuple[float, float]:
    """The range of counts that round to a printed one: 6.65e9 to 6.75e9 for "6.7B"."""
    number, unit = printed[:-1], UNITS[printed[-1]]
    half = 0.5 * 10 ** -len(number.partition(".")[2])
    return (float(number) - half) * unit, (float(number) + half) * unit
