"""The reward of `python -m studies.reward_lengths`, in a file that a process of its own imports."""


def reward(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """Return 1 for each right answer, else 0. Dots at the end are ignored, so length is free."""
    del prompts
    pairs = zip(completions, answers, strict=True)
    return [float(one.rstrip(".") == answer.rstrip(".")) for one, answer in pairs]
