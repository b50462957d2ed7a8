"""Verifiable tasks: prompts whose answers a program can check, for learning by rewards.

Each task is a function from a random generator and a difficulty to a prompt and an answer.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random
from typing import Literal

TaskName = Literal["copy", "reverse", "sort", "spelling", "addition", "countdown"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST = 20
"""Largest number in a countdown."""


def _letters(random: Random, difficulty: int) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(1, difficulty)))


def copy(random: Random, difficulty: int) -> tuple[str, str]:
    """Repeat up to `difficulty` letters."""
    word = _letters(random, difficulty)
    return f"copy {word}=", word


def reverse(random: Random, difficulty: int) -> tuple[str, str]:
    """Write up to `difficulty` letters in reverse order."""
    word = _letters(random, difficulty)
    return f"reverse {word}=", word[::-1]


def sort(random: Random, difficulty: int) -> tuple[str, str]:
    """Sort up to `difficulty` letters."""
    word = _letters(random, difficulty)
    return f"sort {word}=", "".join(sorted(word))


def spelling(random: Random, difficulty: int) -> tuple[str, str]:
    """Separate up to `difficulty` letters by hyphens."""
    word = _letters(random, difficulty)
    return f"spell {word}=", "-".join(word)


def addition(random: Random, difficulty: int) -> tuple[str, str]:
    """Add two numbers of up to `difficulty` digits."""
    first, second = (random.randrange(10 ** random.randint(1, difficulty)) for _ in range(2))
    return f"{first}+{second}=", str(first + second)


def countdown(random: Random, difficulty: int) -> tuple[str, str]:
    """Combine `difficulty` numbers, each used once, to a target; see `reaches`."""
    while True:
        numbers = [random.randint(1, LARGEST) for _ in range(difficulty)]
        expression = str(numbers[0])
        for number in numbers[1:]:
            sign = random.choice("+-*")
            expression = f"({expression})" if sign == "*" else expression
            expression = f"{expression}{sign}{number}"
        if (value := _value(expression)) > 0:
            return f"{' '.join(map(str, numbers))} make {value}=", expression


TASKS: dict[TaskName, Callable[[Random, int], tuple[str, str]]] = {
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "spelling": spelling,
    "addition": addition,
    "countdown": countdown,
}


def examples(task: TaskName, count: int, difficulty: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield up to `count` different prompts of a task with their answers.

    There are fewer if the task has fewer prompts of this difficulty.
    """
    random, seen = Random(f"{task}/{difficulty}/{seed}"), set[str]()
    for _ in range(20 * count):  # far more than needed, unless the prompts are exhausted
        prompt, answer = TASKS[task](random, difficulty)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt, answer
        if len(seen) == count:
            return


def similarity(completion: str, answer: str) -> float:
    """Return the fraction of positions at which two strings are equal; 1 only if they are equal."""
    equal = sum(one == other for one, other in zip(completion, answer, strict=False))
    return equal / max(len(completion), len(answer), 1) if answer or completion else 1.0


def reaches(prompt: str, expression: str) -> float:
    """Score an expression for a countdown: 1 if it is right, 0.1 if it only uses the numbers.

    An expression has integers, `+ - * /` and parentheses. It must use each number of the prompt
    exactly once.
    """
    numbers, _, target = prompt.removesuffix("=").rpartition(" make ")
    if sorted(re.findall(r"\d+", expression)) != sorted(numbers.split()):
        return 0.0
    try:
        return 1.0 if _value(expression) == Fraction(target) else 0.1
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0


def _value(expression: str) -> Fraction:
    """Evaluate an expression; a malformed or deeply nested one raises an error."""
    if re.search(r"[^\d\s+*/()-]", expression):
        raise ValueError(expression)

    def of(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](of(left), of(right))
            case ast.Constant(int() as number):
                return Fraction(number)
        raise ValueError(expression)

    return of(ast.parse(" ".join(expression.split()), mode="eval").body)
