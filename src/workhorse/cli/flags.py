"""Command-line options made from typed attributes with docstrings."""

import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from workhorse.generate.options import docstrings

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def flag(name: str, annotation: Any, default: Any, help: str, **how: Any) -> Decorator:
    """Return a decorator that adds the option `--name` to a verb; its value is None if not given.

    Args:
        name: name of the parameter.
        annotation: the type: `int`, `float`, `str`, `bool`, a `Literal`, a tuple for an option that
            can be repeated, or one of these or None.
        default: shown in the help, unless it is None, False or empty.
        help: the help, which may begin with "True to" or "True for" for a `bool`.
        how: further arguments of `click.option`, such as `type` and `callback`; `also`: other names
            of the option.
    """
    text = re.sub("^True (to|for) (.)", lambda found: found[2].upper(), help).replace("`", "")
    kind, inside = get_origin(annotation) or annotation, get_args(annotation)
    also = how.pop("also", ())
    if kind is bool:
        how |= {"is_flag": True, "default": None}
    elif kind is Literal:
        how.setdefault("type", click.Choice(inside))
    elif kind is tuple:
        how |= {"type": inside[0], "multiple": True}
    else:
        how.setdefault("type", inside[0] if inside else annotation)
    if how.get("multiple"):
        text += " Repeatable."
    elif default is not None and kind is not bool:
        text += f"  [default: {default}]"
    return click.option(f"--{name.replace('_', '-')}", *also, name, help=text, **how)


def flags_of(settings: type) -> Decorator:
    """Return a decorator that adds an option for each attribute of a class with a `Flag`.

    The verb's function gets a parameter for each; it is None if the option is not given.
    """
    helps = docstrings(settings)

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(settings, include_extras=True).items()
        for name, hint in reversed(list(hints)):
            (of,) = getattr(hint, "__metadata__", (None,))
            if of is None:
                continue
            kind, how = hint.__origin__, {"metavar": of.metavar}
            numbers = {int: click.IntRange, float: click.FloatRange}
            number = next((one for one in (kind, *get_args(kind)) if one in numbers), None)
            if number is not None:
                how["type"] = numbers[number](of.least, of.most)
            function = flag(name, kind, getattr(settings, name), helps[name], **how)(function)
        return function

    return add
