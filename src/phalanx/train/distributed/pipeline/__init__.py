"""Pipeline parallelism: partition, stages, schedule."""
