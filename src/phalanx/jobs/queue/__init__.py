"""This machine's queue: who goes next (`schedule.py`), what is known of jobs (`store.py`), who starts them and takes
note of their ends (`supervisor.py`, `runner.py`). `engines/local.py` is its door."""
