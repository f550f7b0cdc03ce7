"""Run jobs: backends, the local queue, and the agent, which supervises the workers of a node and restarts them.

The agent writes events; the fork server has torch imported and forks the workers; the worker (`train/`) trains.
"""
