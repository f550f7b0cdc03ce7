"""Sums over all processes with TensorFlow's MultiWorkerMirroredStrategy."""

import json
import os

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


@tf.function
def step():
    def each():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(rank + 1.0))

    return strategy.experimental_local_results(strategy.run(each))[0]


print(f"sum {int(step().numpy())} of {strategy.num_replicas_in_sync}", flush=True)
