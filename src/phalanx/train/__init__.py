"""Training: trainer, tasks, precision, optimizers, gradient synchronization, checkpoints, recovery.

A worker reads `resolved.yaml` of a run, trains, and reports events. The agent starts and restarts workers.
"""
