"""Where and how a run is kept running: the node's agent, the nursery that forks workers, recovery.

The agent supervises and writes events; the nursery holds torch and forks; the worker (`train/`) trains.
"""
