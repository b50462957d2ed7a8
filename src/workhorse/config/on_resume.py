"""What a resumed run does with another value of a setting: said in the config, at the field.

    learning_rate: Annotated[float, OnResume.GOES_ON] = 1e-3

A mark holds for the field and all inside it, unless a field in there has a mark of its own. Without
any mark it is `NEW_RUN`. `kind` decides for its whole section: a section of another kind is one
change, by the mark of `kind` where it has one. What such a change takes over on the command line,
`OfItsKind` says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from workhorse.config.base import Config


class OnResume(Enum):
    """The value is the rule in words, as a reference prints it."""

    TAKEN = "may change; the training stays the same"
    ROUNDED = "may change; results are then rounded differently"
    GOES_ON = "may change; training goes on with it from there"
    SAME_TEXT = "may change while the tokens stay the same"
    NEW_RUN = "needs a new run"


@dataclass(frozen=True)
class OfItsKind:
    """A mark of a field whose values mean something else where another kind has one of its name.

    A section that becomes of another kind does not take it over.
    """


def rule_of(config: Config, path: Iterable[str]) -> OnResume:
    """The rule of the setting at a path, as `("train", "steps")`.

    Args:
        config: holds the setting; which alternative of a union is taken is seen in it.
        path: names of fields, from the config down. Where it enters plain data, the last rule
            holds.
    """
    rule, here = OnResume.NEW_RUN, config
    for name in path:
        field = type(here).model_fields.get(name) if isinstance(here, Config) else None
        if field is None:
            break
        rule = marked(field.metadata) or rule
        here: Any = getattr(here, name)
    kind = type(here).model_fields.get("kind") if isinstance(here, Config) else None
    return (marked(kind.metadata) if kind else None) or rule


def marked(metadata: Iterable[Any]) -> OnResume | None:
    """The mark among a field's metadata (`Model.model_fields[NAME].metadata`); None: no mark."""
    return next((mark for mark in metadata if isinstance(mark, OnResume)), None)
