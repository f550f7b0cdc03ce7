"""What rows of published tables have in common, whatever they tell of."""

from collections.abc import Mapping

Row = Mapping[str, str]
"""A line of a table: column -> text, empty where nothing is known."""


class CannotPredict(Exception):
    """Why a row cannot be predicted, for the column `why_not`."""
