"""Rewards that recipes of tests name."""

from collections.abc import Sequence


def letters(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """The share of lower-case letters in an answer."""
    return [sum("a" <= char <= "z" for char in answer) / max(len(answer), 1) for answer in answers]


def matches(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """How many words of the question and of the data's answer were passed."""
    assert all(prompt.endswith("assistant\n") for prompt in prompts), prompts
    return [float(len(reference.split())) for reference in references]


def nan(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    return [float("nan")] * len(answers)


def too_few(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    return [1.0]


def endless(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    while True:
        pass
