"""The worker: step, tasks, precision, optimizers, exchange of gradients, guards, checkpoints.

It reads `resolved.yaml` of a run, trains, and reports events; who starts it and how often is the agent's matter.
"""
