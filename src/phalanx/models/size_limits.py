"""How large the sizes of a model may be: beyond that a number is a mistake, and building the model would not end."""

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 4096
"""Most layers of a model. They are built one by one; networks of a thousand have been trained (Wang et al. 2022)."""


def check_bounds(**sizes: int) -> None:
    """Raises ValueError, naming the argument, where a size is beyond any model's."""
    for name, value in sizes.items():
        if isinstance(value, bool):
            raise ValueError(f"{name}={value} must be a whole number")
        maximum = MAX_LAYERS if name in ("layers", "blocks") else MAX_DIMENSION
        if value > maximum:
            raise ValueError(f"{name}={value} must be at most {maximum}")
