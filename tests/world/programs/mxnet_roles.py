"""Checks the variables that ps-lite reads, since MXNet's last release does not run on today's Python.

All roles meet at the scheduler, as ps-lite's do, so that none ends before all have begun.
"""

import os
import socket
import time

role = os.environ["DMLC_ROLE"]
host, port = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
workers, servers = int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"])
assert role in ("worker", "server", "scheduler")
assert 1024 < port < 65536
print(f"{role} of {workers} workers and {servers} servers", flush=True)
if role == "scheduler":
    with socket.create_server((host, port)) as door:
        come = [door.accept()[0] for _ in range(workers + servers)]
    for each in come:
        each.close()
else:
    until = time.monotonic() + 60
    while True:
        try:
            scheduler = socket.create_connection((host, port))
            break
        except ConnectionRefusedError:  # nothing tells when the scheduler begins to listen
            assert time.monotonic() < until, "no scheduler"
            time.sleep(0.05)
    assert scheduler.recv(1) == b""
