"""Faults on purpose: a seeded list of them (`fault_plan.py`) strikes a run (`faults.py`), which is started again
wherever it was started (`launcher.py`) until it is done, and is judged by what it ended in and what it left
(`verify.py`)."""
