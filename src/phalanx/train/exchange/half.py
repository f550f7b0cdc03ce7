"""16 bits on the wire, sums in fp32: half the bytes of an all-reduce.

Each worker gets its part of everybody's gradients in bf16, adds them in fp32, and sends the sum to all in bf16: a
number is rounded twice, however many workers there are. (An all-reduce in bf16 rounds at every hop.)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.strategy import Exact, Pending, Site


class Half(Exact):
    """bf16 on the wire. Its rounding is unbiased enough to need no memory of what it lost."""

    plain = False

    def __init__(self, site: Site, buckets: object):
        self._site = site
        self._received: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        sent = bucket.slab.flat.to(torch.bfloat16)
        received = self._received[number] = torch.empty_like(sent)
        work: Pending | None = dist.all_to_all_single(received, sent, group=self._site.first, async_op=True)
        return work

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        own = self._received.pop(number).view(self._site.world, -1).sum(0, dtype=torch.float32).to(torch.bfloat16)
        gathered = self._sums[number] = own.new_empty(bucket.length)
        return all_gather_into(gathered, own, self._site.second, wait=False)

    def take(self, number: int, bucket: Bucket) -> None:
        bucket.slab.flat.copy_(self._sums.pop(number))
