"""Gradient synchronization between replicas: buckets, algorithms that sum them, compression.

reducer            reduces gradients after backward
bucketed_reducer   counts gradients as backward produces them, and sends buckets in order
buckets            gradients that are reduced together
comm_queue         runs the phases of an algorithm on buckets during backward
algorithms/        one algorithm per file; `base` has the interface
compression/       bf16, int8 and PowerSGD
registry           the algorithms by the names that recipes use
selection          selects the algorithm if the recipe says `auto`
"""

from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.buckets import GRAD_ALIGNMENT_ELEMENTS, Bucket, make_buckets

__all__ = ["GRAD_ALIGNMENT_ELEMENTS", "Bucket", "BucketedReducer", "make_buckets"]
