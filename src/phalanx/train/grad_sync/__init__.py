"""Gradient synchronization between replicas: buckets, algorithms that sum them, compression."""

from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.buckets import GRAD_ALIGNMENT_ELEMENTS, Bucket, make_buckets

__all__ = ["GRAD_ALIGNMENT_ELEMENTS", "Bucket", "BucketedReducer", "make_buckets"]
