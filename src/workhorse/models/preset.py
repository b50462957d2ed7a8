"""`Preset`: a published model's config, parameter count and source."""

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
        name: published name, in kebab case.
        make: function that builds the config; called when `config` is first accessed.
        parameters: exact parameter count of that config, a tied matrix counted once.
        exactness: source of the parameter count. `released`: published code or weights determine
            it; `printed`: it follows from the shape printed in a paper; `derived`: the preset is
            only a part of a published model, and the count follows from the shape of that part.
        printed: parameter count as printed in the source ("6.7B"); empty if the source prints none.
        source: paper and table, or released config, that the shape comes from.
        notes: contradictions between sources, and values that we chose because no source has them.
        released: `config.json` fields that the config is read from; None if code builds it.
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
        """True if the exact count rounds to the printed one; None if no count is printed."""
        if not self.printed:
            return None
        low, high = rounding(self.printed)
        return low <= self.parameters <= high


def rounding(printed: str) -> tuple[float, float]:
    """Return the range of counts that round to a printed count: 6.65e9 to 6.75e9 for "6.7B"."""
    number, unit = printed[:-1], UNITS[printed[-1]]
    half = 0.5 * 10 ** -len(number.partition(".")[2])
    return (float(number) - half) * unit, (float(number) + half) * unit
