"""Replace fused attention and dropout while a model is followed, by what GPUs compute and keep in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.planner.trace.op_recorder import OpRecorder


class _FakeFusedAttention(torch.autograd.Function):
    """Fused attention that computes nothing: outputs of the right shape, and a record of both phases. It keeps what a
    fused kernel keeps: queries, keys, values, the result, and a sum for each query (Dao et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, recorder: OpRecorder, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        # Laid out as fused kernels do it, [.., s, h, d]: what follows joins the heads without copying.
        out = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder.record_attention("forward", query, key, value, causal)
        recorder.record_attention_result([out, sums], query)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.recorder, ctx.causal = recorder, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        ctx.recorder.record_attention("backward", query, key, value, ctx.causal, out, sums, grad)
        found = [torch.empty_like(each) for each in (query, key, value)]
        ctx.recorder.record_attention_result(found, query)
        return (None, *found, None)


class AttentionCaptureMode(TorchFunctionMode):
    """Puts `_FakeFusedAttention` in the place of torch's fused attention, and dropout as GPUs do it, which keeps a mask
    of a byte for each element, in the place of the meta device's, which keeps a factor."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # a mask over all pairs is computed in full by every kernel
            causal = bool(given.get("is_causal", False))
            return _FakeFusedAttention.apply(self._recorder, given["query"], given["key"], given["value"], causal)
        if getattr(func, "__name__", "") == "dropout":  # by name: runs in this process replace the function
            given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            if given.get("training", True) and given.get("p", 0.5) > 0:
                return torch.native_dropout(given["input"], given.get("p", 0.5), True)[0]
            return given["input"]
        return func(*args, **kwargs)
