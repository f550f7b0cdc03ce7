"""The local job queue: job database (`database.py`), and the processes that start jobs and record their ends
(`daemon.py`, `job_runner.py`). The backend `backends/local.py` uses it."""
