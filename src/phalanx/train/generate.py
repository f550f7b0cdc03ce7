"""Text from a language model, token by token. Any model that maps tokens [1, s] to logits [1, s, vocab] will do."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from phalanx.train.hf.inputs import get_logits

MIN_TEMPERATURE = 1e-6
"""Below this temperature all but the likeliest token have a probability of 0, and logits divided by it overflow."""


def generate_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    window: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    device: torch.device,
) -> Iterator[int]:
    """Yield `tokens` tokens that continue `prompt` (at least one token). The model sees the last `window`.

    `temperature` 0 always takes the likeliest; `top_k` samples among so many. The same seed gives the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    context = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            inputs = torch.tensor([context[-window:]], device=device)
            logits = get_logits(model(inputs))[0, -1].float().cpu()
            token = _sample_token(logits, temperature, top_k, generator)
            context.append(token)
            yield token


def _sample_token(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
