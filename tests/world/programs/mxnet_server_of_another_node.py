"""The first node's server and its worker, and a second node's worker that is served for longer."""

import os
import signal
import sys
import time
from pathlib import Path

role, folder = os.environ["DMLC_ROLE"], Path(sys.argv[1])
serving, first, served = (folder / name for name in ("serving", "first", "served"))


def wait_for(what, so: bool = True) -> None:
    until = time.monotonic() + 50
    while what() is not so:
        assert time.monotonic() < until
        time.sleep(0.01)


def asked_to_end(*_) -> None:
    print("asked to end", "afterwards" if served.exists() else "too early", flush=True)
    sys.exit(0)


if role == "server" and os.environ["DMLC_SERVER_ID"] == "0":
    signal.signal(signal.SIGTERM, asked_to_end)
    serving.touch()
    signal.pause()
elif role == "worker" and os.environ["DMLC_WORKER_ID"] == "0":
    wait_for(serving.exists)
    (folder / "begun").write_text(str(os.getpid()))
    (folder / "begun").rename(first)
elif role == "worker":
    wait_for(first.exists)
    wait_for(Path("/proc", first.read_text()).exists, False)  # its launcher knows that it has ended
    served.touch()
else:
    signal.pause()
