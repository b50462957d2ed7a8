"""What variants must share, or differ in, so that their losses can be compared."""

from collections.abc import Iterator, Mapping
from typing import Literal

from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.train import Recipe
from workhorse.train.resume.resume import differences

Measure = Literal["loss", "bits_per_byte"]
"""What is compared, as a run's metrics name it."""


def measure_of(recipes: Mapping[str, Recipe], baseline: str) -> Measure:
    """Nats per token where all have the same tokens, otherwise bits per byte of the same text.

    Args:
        recipes: of the variants, by name.
        baseline: the name of one of them.

    Raises:
        WorkhorseError: one has other text than the baseline.
    """
    measure: Measure = "loss"
    for name, recipe in recipes.items():
        for path in _text_differences(recipes[baseline], recipe):
            if path[0] == "data" and path != ("data", "packing"):
                raise WorkhorseError(
                    f"{name!r} has another {'.'.join(path)} than {baseline!r}: losses on "
                    "different text say nothing about the design; give all variants the same, "
                    "in the base"
                )
            measure = "bits_per_byte"
    return measure


def _text_differences(first: Recipe, second: Recipe) -> Iterator[tuple[str, ...]]:
    """The settings of text and tokens that differ, without the place of the token shards."""
    for section in ("data", "tokenizer"):
        before, now = (getattr(recipe, section).to_dict() for recipe in (first, second))
        for path, _, _ in differences(before, now, (section,)):
            if path[:2] != ("data", "cache_dir"):
                yield path


def check_different(recipes: Mapping[str, Recipe]) -> None:
    """Refuse variants that are the same once written out.

    Raises:
        ConfigError: with their names.
    """
    seen: dict[str, str] = {}
    for name, recipe in recipes.items():
        same = recipe.written_out().replace(description="")
        fields = repr(same.replace(data=same.data.replace(cache_dir=None)).to_dict())
        if (other := seen.setdefault(fields, name)) != name:
            raise ConfigError(
                f"{other!r} and {name!r} are the same once written out; change or remove one of "
                "them",
                "variants",
            )


def check_parameters(counts: Mapping[str, int], baseline: str, allowed: bool | float) -> None:
    """Refuse variants with too many or too few parameters.

    Args:
        counts: parameters of the variants, by name.
        baseline: the name of one of them.
        allowed: the share by which others may differ from it; True: none; False: any.

    Raises:
        WorkhorseError: with the first that differs more.
    """
    if allowed is False:
        return
    share = 0.0 if allowed is True else allowed
    wanted = counts[baseline]
    for name, count in counts.items():
        if abs(count - wanted) > share * wanted:
            raise WorkhorseError(
                f"{name!r} has {count:,} parameters, {count / wanted - 1:+.2%} beside the "
                f"{wanted:,} of {baseline!r}, and budget.parameters allows {share:.2%}; "
                "change its sizes, or budget.parameters"
            )
