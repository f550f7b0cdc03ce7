"""Check whether a model sees tokens that it must not see: those that it is to predict, or, with document masking, those
of another document.

The model is tried, not read: this finds a forgotten mask as well as an encoder that was never causal. Whether a
sequence can be split over workers (`parallelism.context`) is tried in the same way.
"""

import itertools

import torch
from torch import Tensor, nn

from phalanx.data import IGNORE_INDEX
from phalanx.errors import RecipeError
from phalanx.recipe import describe_exception
from phalanx.train.distributed.context_parallel import find_position_argument, without_attention
from phalanx.train.hf.inputs import adapt_inputs, get_logits
from phalanx.train.loss import eval_mode
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch

MAX_RELATIVE_CHANGE = 1e-3
"""Change of an output, relative to the largest, beyond what rounding explains."""
MAX_RELATIVE_CHANGE_PACKED, MAX_CHANGED_POSITION_FRACTION = 5e-3, 0.01
"""The same between samples of different lengths, for which kernels differ; and the share of positions at which it must
show: a router of experts may decide otherwise by rounding, at one or another."""
MAX_PACKING_DIFFERENCE = 1e-5
"""Relative difference of the loss and of the gradients, in fp32, of a packed sample and of its documents alone."""
NUM_PARTS, MAX_ROUNDING_POSITIONS = 4, 1
"""Parts into which a sequence is cut to try whether it can be, and at how many positions rounding may do the same."""


@torch.no_grad()
def check_causal(model: nn.Module, task: Task, batch: TensorBatch) -> None:
    """Raise RecipeError when outputs [b, s, v] at earlier positions change with the last of `batch["tokens"]` [b, s].
    Models with outputs that vary between equal calls, even in eval mode, are not checked."""
    tokens = batch["tokens"]
    changed_tokens = tokens.clone()
    changed_tokens[:, -1] = torch.where(tokens[:, -1] == 0, 1, tokens[:, -1] - 1)

    def outputs(tokens: Tensor) -> Tensor:
        args, kwargs = task.inputs({**batch, "tokens": tokens})
        return get_logits(model(*args, **kwargs))[:, :-1].float()

    with eval_mode(model):
        before, repeated, after = outputs(tokens), outputs(tokens), outputs(changed_tokens)
    if not before.numel() or not torch.equal(before, repeated):
        return
    if (before - after).abs().max() > MAX_RELATIVE_CHANGE * before.abs().max():
        decodes = getattr(getattr(model, "config", None), "is_decoder", None)
        hint = "model.args.is_decoder=true makes one of BERT's kind" if decodes is False else "mask its attention"
        raise RecipeError(
            f"model.build: {type(model).__name__} sees the tokens that it is to predict: what it says about earlier "
            f"ones changes with the last. Next-token training needs a causal model ({hint}); for another aim give a "
            "task of your own"
        )


@torch.no_grad()
def check_document_masking(model: nn.Module, task: Task, batch: TensorBatch) -> None:
    """Raise RecipeError when a sample of two documents does not give the outputs [1, s, v] that each gives alone.
    `batch` has `tokens` [b, s], and `documents` where documents are masked. Models with outputs that vary between equal
    calls, even in eval mode, are not checked."""
    if "documents" not in batch or (length := batch["tokens"].shape[1]) < 2:
        return
    tokens, name = batch["tokens"][:1], type(model).__name__
    cut = max(1, length // 4)  # so that the longer one reaches beyond windows as far as the sample does
    documents = (torch.arange(length, device=tokens.device) >= cut).to(batch["documents"].dtype)[None]

    def outputs(tokens: Tensor, documents: Tensor | None) -> Tensor:
        given = {} if documents is None else {"documents": documents}
        args, kwargs = task.inputs({"tokens": tokens, **given})
        return get_logits(model(*args, **kwargs)).float()

    with eval_mode(model):
        separate = [
            torch.cat([outputs(each, None) for each in (tokens[:, :cut], tokens[:, cut:])], 1) for _ in range(2)
        ]
        try:
            packed = outputs(tokens, documents)
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"data.document_masking: {name} fails where it is to keep documents separate "
                f"({describe_exception(error)}); use data.document_masking=false, or a model that takes `documents`"
            ) from error
    if not torch.equal(*separate):
        return
    changed = (packed - separate[0]).abs().amax(-1)[0] > MAX_RELATIVE_CHANGE_PACKED * separate[0].abs().max()
    if changed.float().mean() > MAX_CHANGED_POSITION_FRACTION:
        raise RecipeError(
            f"data.document_masking: {name} does not keep documents separate: a sample of two documents gives other "
            f"outputs than each document alone, at {int(changed.sum())} of {length} tokens; use "
            "data.document_masking=false, or a model with masks and positions that follow `documents`"
        )


def check_packing(model: nn.Module, batch: TensorBatch) -> str:
    """Compare the loss and the gradients of a packed sample with those of its documents, each alone, and say how far
    they differ. Raises RecipeError beyond MAX_PACKING_DIFFERENCE. `batch` has `tokens`, `targets` and `documents`
    [1, s]."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = ("tokens", "targets", "documents")
    bounds = [0, *(batch["documents"][0].diff().nonzero()[:, 0] + 1).tolist(), batch["tokens"].shape[1]]
    alone = [{name: batch[name][:, start:stop] for name in names[:2]} for start, stop in itertools.pairwise(bounds)]
    alone = [part for part in alone if (part["targets"] != IGNORE_INDEX).any()]

    def loss_and_gradients(parts: list[TensorBatch]) -> tuple[float, list[Tensor]]:
        total, sums = 0.0, [torch.zeros_like(weight) for weight in weights]
        for part in parts:
            args, kwargs = LanguageModeling().inputs(part)
            loss, _ = LanguageModeling().loss(model(*args, **kwargs), part)
            for summed, gradient in zip(sums, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                summed += 0 if gradient is None else gradient
            total += float(loss.detach())
        return total, sums

    with eval_mode(model):
        packed_loss, packed = loss_and_gradients([{name: batch[name] for name in names}])
        loss, gradients = loss_and_gradients(alone)
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(packed, gradients, strict=True))
    off_loss, off_gradients = abs(packed_loss - loss) / max(abs(loss), 1e-30), difference**0.5 / max(norm, 1e-30)
    text = f"{len(alone)} documents: loss within {off_loss:.0e}, gradients within {off_gradients:.0e} of each alone"
    if not max(off_loss, off_gradients) <= MAX_PACKING_DIFFERENCE:
        raise RecipeError(
            f"data.packing: {type(model).__name__} does not compute a packed sample as its documents ({text}, expected "
            f"{MAX_PACKING_DIFFERENCE:.0e}); use data.packing=single, or a model with masks and positions that follow "
            "`documents`"
        )
    return text


@torch.no_grad()
def check_split(model: nn.Module, task: Task, batch: TensorBatch) -> None:
    """Raise RecipeError where a model reads other positions of `batch["tokens"]` [b, s] by other means than
    torch.nn.functional.scaled_dot_product_attention: without attention, the parts of a sequence must give the outputs
    [1, s, v] of the whole. Models with outputs that vary between equal calls, even in eval mode, are not checked."""
    tokens = batch["tokens"][:1]
    adapts = any(hook is adapt_inputs for hook in model._forward_pre_hooks.values())
    argument = "positions" if adapts else find_position_argument(model)
    if (length := tokens.shape[1]) < 2 * NUM_PARTS or argument is None:
        return
    where = torch.arange(length, device=tokens.device)[None]

    def outputs(start: int, end: int) -> Tensor:
        args, kwargs = task.inputs({"tokens": tokens[:, start:end]})
        return get_logits(model(*args, **{**kwargs, argument: where[:, start:end]})).float()

    cuts = [length * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    with eval_mode(model), without_attention():
        whole, again = outputs(0, length), outputs(0, length)
        parts = torch.cat([outputs(start, end) for start, end in itertools.pairwise(cuts)], 1)
    if not torch.equal(whole, again):
        return
    off = (whole - parts).abs().amax(-1)[0] > MAX_RELATIVE_CHANGE_PACKED * whole.abs().max()
    if off.sum() > MAX_ROUNDING_POSITIONS:
        raise RecipeError(
            f"parallelism.context: {type(model).__name__} looks at other positions by something else than "
            "torch.nn.functional.scaled_dot_product_attention (attention of its own, a convolution, a shift, a state "
            "that it carries along), so each part of a sequence would be trained as a sequence of its own; call that "
            "function as F.scaled_dot_product_attention, or use parallelism.context=1"
        )
