"""The reward of grpo.yaml."""

from collections.abc import Sequence


def is_right(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return 1 for the data's own answer, else 0."""
    return [float(answer == reference) for answer, reference in zip(answers, references, strict=True)]
