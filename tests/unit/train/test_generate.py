"""Text from a model, token by token."""

import torch
from torch import Tensor, nn

from phalanx.train.inference import SamplingOptions, generate_tokens
from small_train import tiny_lm

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Says that the next token is the last one plus one (mod 10); `likely` of the others are nearly as likely."""

    def __init__(self, likely: int = 0):
        super().__init__()
        self.likely = likely
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens[0].tolist())
        logits = torch.full((1, tokens.shape[1], 10), -20.0)
        for place, token in enumerate(tokens[0].tolist()):
            logits[0, place, (token + 1) % 10] = 2.0
            for other in range(self.likely):
                logits[0, place, (token + 2 + other) % 10] = 1.9
        return logits


def text(
    model: nn.Module, tokens: int = 12, prompt: tuple[int, ...] = (1, 2), window: int = 8, **how: object
) -> list[int]:
    return list(generate_tokens(model, prompt, SamplingOptions(num_tokens=tokens, **how), window, CPU))  # type: ignore[arg-type]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert text(Counting(likely=8), temperature=0) == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_the_model_sees_no_more_than_its_window() -> None:
    model = Counting()
    text(model, tokens=4, prompt=(5, 6, 7), window=4, temperature=0)
    assert model.seen == [[5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 0]]


def test_the_same_seed_gives_the_same_text() -> None:
    model = tiny_lm().eval()
    one = text(model, seed=3, tokens=40)
    torch.rand(5)
    assert text(model, seed=3, tokens=40) == one
    assert text(model, seed=4, tokens=40) != one


def test_top_k_leaves_only_the_likeliest_to_choose_from() -> None:
    chosen = text(Counting(likely=8), tokens=60, top_k=1)
    assert chosen == text(Counting(), tokens=60, temperature=0)


def test_a_lower_temperature_strays_less() -> None:
    def strays(temperature: float) -> int:
        chosen = text(Counting(likely=3), tokens=200, temperature=temperature)
        return sum((after - before) % 10 != 1 for before, after in zip([2, *chosen], chosen, strict=False))

    assert strays(0.02) < 20 < strays(1.0)
