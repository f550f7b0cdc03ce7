"""Validate the planner: predict the runs of published tables and compare with what was measured."""
