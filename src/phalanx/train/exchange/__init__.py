"""The exchange of gradients between replicas: buckets, and strategies for summing them, one a file.

bucketed    counts gradients as backward makes them, and sends buckets in order
buckets     gradients that travel together
strategy    what a strategy is
courier     carries buckets through a strategy's stages beside backward
rounds      steps of workers' own, and the outer steps between, at which they exchange weights
direct      parts from all workers to all others at once
messages    from one worker to another, for strategies that the library has not
ways        the strategies by the names that recipes give them
"""

from phalanx.train.exchange.bucketed import BucketedReducer
from phalanx.train.exchange.buckets import GRAD_ALIGNMENT_ELEMENTS, Bucket, make_buckets

__all__ = ["GRAD_ALIGNMENT_ELEMENTS", "Bucket", "BucketedReducer", "make_buckets"]
