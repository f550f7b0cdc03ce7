"""Simulate months of a fleet: jobs, failures, checkpoints, repairs, power and energy."""
