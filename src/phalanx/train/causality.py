"""Whether a model sees the tokens that it is to predict: then it would learn next tokens by looking, and nothing else.

Tried, not read off: the last token is changed, and what the model says about those before it must stay. So a mask that
was forgotten in a model of one's own is found as well as an encoder, such as BERT, that was never meant for it.
"""

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.head import evaluating
from phalanx.train.huggingface_calls import logits_of
from phalanx.train.tasks import Task, TensorBatch

SEEN = 1e-3
"""Change of an output, relative to the largest, beyond what rounding explains."""


@torch.no_grad()
def check_causal(model: nn.Module, task: Task, batch: TensorBatch) -> None:
    """RecipeError when outputs [b, s, v] at earlier positions change with the last of `batch["tokens"]` [b, s]. Models
    whose outputs change by themselves, even when evaluated, are not judged."""
    tokens = batch["tokens"]
    other = tokens.clone()
    other[:, -1] = torch.where(tokens[:, -1] == 0, 1, tokens[:, -1] - 1)

    def outputs(tokens: Tensor) -> Tensor:
        args, kwargs = task.inputs({**batch, "tokens": tokens})
        return logits_of(model(*args, **kwargs))[:, :-1].float()

    with evaluating(model):
        before, again, after = outputs(tokens), outputs(tokens), outputs(other)
    if not before.numel() or not torch.equal(before, again):
        return
    if (before - after).abs().max() > SEEN * before.abs().max():
        decodes = getattr(getattr(model, "config", None), "is_decoder", None)
        cure = "model.args.is_decoder=true makes one of BERT's kind" if decodes is False else "mask its attention"
        raise RecipeError(
            f"model.build: {type(model).__name__} sees the tokens that it is to predict: what it says about earlier "
            f"ones changes with the last. Next-token training needs a causal model ({cure}); for another aim give a "
            "task of your own"
        )
