"""Rewards of answers to the questions of recipes/stdlib-chat.yaml: 1 if right, else 0.

The taught form is "`Lock` is a class of `threading`. A sentence." The rewards do not check that the
sentence is true.

    workhorse evaluate RUN --data stdlib --reward recipes/stdlib_answers.py:form
"""

import re

START = re.compile(r"`(?P<name>[^`]+)` is a (?P<kind>class|function) of `(?P<module>[^`]+)`\. ")
REPEATED = re.compile(r"(\S.+?)\1\1")
"""At least two characters, three times in a row."""
PHRASE = 4
"""Number of words that may not occur twice in the same order."""


def form(prompts, completions, answers):
    """1 if an answer has the taught form, ends with a full stop, and does not repeat itself."""
    return [
        float(bool(START.match(text)) and text.endswith(".") and not repeats(text))
        for text in map(str.strip, completions)
    ]


def name(prompts, completions, answers):
    """1 if the answer begins with the right name."""
    return _equal("name", completions, answers)


def kind(prompts, completions, answers):
    """1 if the kind, class or function, is right."""
    return _equal("kind", completions, answers)


def module(prompts, completions, answers):
    """1 if the module is right."""
    return _equal("module", completions, answers)


def reward(prompts, completions, answers):
    """The mean of the four."""
    scores = [score(prompts, completions, answers) for score in (form, name, kind, module)]
    return [sum(each) / len(scores) for each in zip(*scores, strict=True)]


def repeats(text):
    """True if a text repeats characters or a phrase."""
    words = text.split()
    phrases = [tuple(words[at : at + PHRASE]) for at in range(len(words) - PHRASE + 1)]
    return bool(REPEATED.search(text)) or len(set(phrases)) < len(phrases)


def _equal(part, completions, answers):
    found = [
        (START.match(completion.strip()), START.match(answer))
        for completion, answer in zip(completions, answers, strict=True)
    ]
    return [float(bool(ours and known and ours[part] == known[part])) for ours, known in found]
