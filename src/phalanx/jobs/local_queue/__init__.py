"""This machine's queue: who goes next (`policy.py`), what is known of jobs (`database.py`), who starts them and takes
note of their ends (`daemon.py`, `job_runner.py`). `backends/local.py` is its door."""
