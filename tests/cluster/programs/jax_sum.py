"""Sums over all processes with JAX."""

import os

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),  # the coordinator's address it reads itself
    process_id=int(os.environ["JAX_PROCESS_ID"]),
)
import jax.numpy as jnp  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

found = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1.0]))
print(f"sum {int(found.sum())} of {jax.process_count()}")
