"""The same Unigram vocabulary from every run of the same training."""

from collections.abc import Iterable

from workhorse.errors import WorkhorseError

CHARACTER_STEP = 1e-4
"""The step of the scores that the library gives, in random order, to characters it must keep."""
DECIMALS = 4
"""Decimals to which scores (natural logarithms of probabilities) are rounded: they differ by less
than 1e-10 from run to run, because they are summed in a random order."""


def stable_vocabulary(vocab: Iterable[tuple[str, float | None]]) -> list[tuple[str, float]]:
    """Pieces with their scores, without what differs between two runs of the library's trainer.

    Characters that no longer pay for themselves but must stay get `lowest, lowest + 1e-4, ...` in
    random order: they are put in code point order. Then scores are rounded, and pieces sorted by
    score and code points.

    Raises:
        WorkhorseError: pieces without a score, as all are where the library found no text to count.
    """
    found = dict(vocab)
    scores = {piece: score for piece, score in found.items() if score is not None}
    if len(scores) < len(found):
        raise WorkhorseError(
            "the corpus holds nothing that unigram can learn from (only NULs, or invisible "
            "characters); give texts with words in them"
        )
    scores.update(_reordered(_kept_characters(scores)))
    rounded = ((piece, round(score, DECIMALS)) for piece, score in scores.items())
    return sorted(rounded, key=lambda entry: (-entry[1], entry[0]))


def _kept_characters(scores: dict[str, float]) -> dict[str, float]:
    """The characters whose scores continue the lowest score in equal steps."""
    lowest = min(scores.values(), default=0.0)
    characters = sorted((score, piece) for piece, score in scores.items() if len(piece) == 1)
    kept: dict[str, float] = {}
    following = 0
    for score, character in characters:
        steps = (score - lowest) / CHARACTER_STEP
        if round(steps) > following:
            break  # a gap: what comes now was scored by its frequency
        if abs(steps - round(steps)) < 1e-3:  # noqa: PLR2004 (above the noise, below a step)
            kept[character] = score
            following = round(steps) + 1
    return kept


def _reordered(kept: dict[str, float]) -> dict[str, float]:
    return dict(zip(sorted(kept), sorted(kept.values()), strict=True))
