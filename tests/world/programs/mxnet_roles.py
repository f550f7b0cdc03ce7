"""Checks the variables that ps-lite reads, since MXNet's last release does not run on today's Python."""

import os

role = os.environ["DMLC_ROLE"]
host, port = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
workers, servers = int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"])
assert role in ("worker", "server", "scheduler")
assert host
assert 1024 < port < 65536
print(f"{role} of {workers} workers and {servers} servers", flush=True)
