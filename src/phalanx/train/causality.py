"""Whether a model sees tokens that it must not: those that it is to predict, or, where documents are to be separate,
those of another document.

Tried, not read off. The last token is changed, and what the model says about those before it must stay. And a sample of
two documents must give what each of them gives by itself, so that masks, windows, positions and recurrent layers are
judged by what they do. So a mask that was forgotten in a model of one's own is found as well as an encoder, such as
BERT, that was never meant for it.
"""

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe import told
from phalanx.train.head import evaluating
from phalanx.train.huggingface_calls import logits_of
from phalanx.train.tasks import Task, TensorBatch

SEEN = 1e-3
"""Change of an output, relative to the largest, beyond what rounding explains."""
OTHER, SOME = 5e-3, 0.01
"""The same between samples of different lengths, for which kernels differ; and the share of positions at which it must
show: a router of experts may decide otherwise by rounding, at one or another."""


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


@torch.no_grad()
def check_documents(model: nn.Module, task: Task, batch: TensorBatch) -> None:
    """RecipeError when a sample of two documents does not give the outputs [1, s, v] that each gives by itself; `batch`
    has `tokens` [b, s], and `documents` where these are to be separate. Models whose outputs change by themselves, even
    when evaluated, are not judged."""
    if "documents" not in batch or (length := batch["tokens"].shape[1]) < 2:
        return
    tokens, name = batch["tokens"][:1], type(model).__name__
    cut = max(1, length // 4)  # so that the longer one reaches beyond windows as far as the sample does
    documents = (torch.arange(length, device=tokens.device) >= cut).to(batch["documents"].dtype)[None]

    def outputs(tokens: Tensor, documents: Tensor | None) -> Tensor:
        given = {} if documents is None else {"documents": documents}
        args, kwargs = task.inputs({"tokens": tokens, **given})
        return logits_of(model(*args, **kwargs)).float()

    with evaluating(model):
        parts = [torch.cat([outputs(each, None) for each in (tokens[:, :cut], tokens[:, cut:])], 1) for _ in range(2)]
        try:
            packed = outputs(tokens, documents)
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"data.document_masking: {name} fails where it is to keep documents separate ({told(error)}); use "
                "data.document_masking=false, or a model that takes `documents`"
            ) from error
    if not torch.equal(*parts):
        return
    off = (packed - parts[0]).abs().amax(-1)[0] > OTHER * parts[0].abs().max()
    if off.float().mean() > SOME:
        raise RecipeError(
            f"data.document_masking: {name} does not keep documents separate: a sample of two gives other outputs "
            f"than each by itself, at {int(off.sum())} of {length} tokens; use data.document_masking=false, or a "
            "model whose masks and positions follow `documents`"
        )
