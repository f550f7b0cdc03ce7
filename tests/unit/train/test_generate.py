"""Text from a model, token by token."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from phalanx.models import transformer
from phalanx.train.hf.inputs import install_input_adapter
from phalanx.train.inference import ContextReader, SamplingOptions, generate_tokens
from small_train import tiny_lm

if importlib.util.find_spec("transformers"):
    import tiny_huggingface as tiny
else:
    tiny = None  # type: ignore[assignment]

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


def read_logits(model: nn.Module, context: list[int], prompt: int, window: int = 64) -> tuple[Tensor, bool]:
    """The logits of each next token of a context from its first `prompt` tokens on; whether a cache was kept."""
    reader = ContextReader(model, window, CPU)
    rows = [reader.compute_next_logits(context[:length]) for length in range(prompt, len(context) + 1)]
    return torch.stack(rows), reader._num_cached > 0 and reader._cache is not None


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_cache_of_our_transformer_gives_the_logits_of_the_whole_text(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = transformer(256, 32, layers=2, hidden_size=16, num_heads=2, num_kv_heads=kv_heads).eval()
    context = torch.randint(0, 256, (20,)).tolist()
    logits, keeps_cache = read_logits(model, context, prompt=7)
    assert keeps_cache
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([context]))[0, 6:], rtol=1e-4, atol=1e-6)


def test_several_tokens_behind_cached_ones_see_those_before_them_only() -> None:
    model = transformer(256, 32, layers=2, hidden_size=16, num_heads=2).eval()
    tokens, caches = torch.randint(0, 256, (1, 9)), model.make_caches()
    with torch.no_grad():
        logits = torch.cat([model(part, caches=caches) for part in tokens.chunk(3, 1)], 1)
        torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-6)


def test_a_text_longer_than_the_window_is_the_same_as_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(10, 8, layers=1, hidden_size=16, num_heads=2).eval()
    cached = text(model, tokens=20, window=8, temperature=0)
    monkeypatch.setattr("phalanx.train.inference._find_cache_argument", lambda model: None)
    assert cached == text(model, tokens=20, window=8, temperature=0)


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES] if tiny else [])
def test_the_cache_of_hugging_face_models_gives_the_logits_of_the_whole_text(name: str) -> None:
    model = tiny.build_random_model(name)
    install_input_adapter(model)
    context = tiny.random_tokens(1, 14)[0].tolist()
    logits, keeps_cache = read_logits(model, context, prompt=6)
    whole = [read_logits(model, context[:length], prompt=length)[0] for length in range(6, 15)]
    assert keeps_cache or name == "granitemoe"  # which returns none
    torch.testing.assert_close(logits, torch.cat(whole), rtol=1e-3, atol=1e-4)
