"""What one rendering of a chat template may use, and how large a value is."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, Undefined

MAX_SOURCE = 100_000
"""Characters of a template."""
MAX_TEXT = 4_000_000
"""Characters of one text that a template makes."""
MAX_WORK = 40_000_000
"""Characters of all texts that a rendering makes, those it throws away included."""
MAX_STEPS = 200_000
"""Loop iterations and calls of one rendering."""
MAX_SECONDS = 1.0
"""Of this thread's processor time, for one rendering."""
MAX_ITEMS = 100_000
"""Entries of one list."""
MAX_ARGUMENT = 1_000
"""Width, precision or indentation that a filter may be asked for."""
ITEM_SIZE = 16
"""One more entry of a list counts as so many characters."""


class LimitError(TemplateError):
    """The template does what no chat template needs."""


class Budget:
    """Steps, characters and seconds of one rendering."""

    def __init__(self) -> None:
        self._steps = self._work = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def spend(self, characters: int) -> None:
        """Count one step, and the size of what it makes.

        Raises:
            LimitError: too many steps, too much time or too long a text.
        """
        self._steps += 1
        self._work += characters
        if self._steps > MAX_STEPS or time.thread_time() > self._deadline:
            raise LimitError(f"takes more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds")
        if characters > MAX_TEXT or self._work > MAX_WORK:
            raise LimitError(f"makes a text of more than {MAX_TEXT:,} characters")

    def counted(self, items: Iterable[Any], cost: int = 0) -> Iterator[Any]:
        """The items, each of which is a step."""
        for item in items:
            self.spend(cost)
            yield item

    def measured(self, value: Any) -> Any:
        """A list or mapping, counted with everything in it: nesting is how it outgrows memory."""
        size = 0
        left = [value]
        while left:
            item = left.pop()
            size += ITEM_SIZE + (len(item) if isinstance(item, str) else 0)
            if isinstance(item, dict):
                left += item.keys()
                left += item.values()
            elif isinstance(item, list | tuple):
                left += item
            if size + ITEM_SIZE * len(left) > MAX_TEXT:
                raise LimitError(f"makes a list of more than {MAX_TEXT:,} characters")
        self.spend(size)
        return value

    def printed(self, value: Any) -> Any:
        """What `{{ }}` prints: a value whose text is bounded by its size."""
        if value is None or isinstance(value, str | int | float | Undefined):
            self.spend(len(value) if isinstance(value, str) else 0)
            return value
        left = [value]
        self.measured(value)
        while left:
            item = left.pop()
            if isinstance(item, dict):
                left += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                left += item
            elif item is not None and not isinstance(item, str | int | float):
                raise LimitError(f"prints a {type(item).__name__}; print texts, numbers and lists")
        return value


def checked_length(length: int) -> int:
    """The length of a list that is about to be made."""
    if length > MAX_ITEMS:
        raise LimitError(f"makes a list of more than {MAX_ITEMS:,} entries")
    return length


def checked_width(width: Any) -> int:
    """A number by which a text may grow."""
    if not isinstance(width, int) or abs(width) > MAX_ARGUMENT:
        raise LimitError(f"asks for a width of {str(width)[:40]}; at most {MAX_ARGUMENT:,} is done")
    return width
