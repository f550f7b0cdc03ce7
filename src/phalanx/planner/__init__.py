"""Predict memory, step time, scaling, goodput, energy and cost of a run from a model profile and a cluster."""
