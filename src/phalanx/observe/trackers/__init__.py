"""Send a run to experiment trackers: TensorBoard, W&B, MLflow, trackio.

Only the run directory is read, by a process of its own, so that a tracker that is down, slow or full cannot slow or
stop training. `phalanx report --to` sends a run with the same code.
"""
