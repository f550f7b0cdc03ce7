"""How large the sizes of a model may be: beyond that a number is a mistake, and building the model would not end."""

LARGEST = 1 << 24
DEEPEST = 4096
"""Layers, each of which is built by itself; networks of a thousand have been trained (Wang et al. 2022)."""


def check_bounds(**sizes: int) -> None:
    """Raises ValueError, naming the argument, where a size is beyond any model's."""
    for name, value in sizes.items():
        if isinstance(value, bool):
            raise ValueError(f"{name}={value} must be a whole number")
        most = DEEPEST if name in ("layers", "blocks") else LARGEST
        if value > most:
            raise ValueError(f"{name}={value} must be at most {most}")
