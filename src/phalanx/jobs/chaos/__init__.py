"""Faults on purpose: a seeded list of them (`plan.py`) strikes a run (`inject.py`), which is started again wherever it
was started (`ground.py`) until it is done, and is judged by what it ended in and what it left (`referee.py`)."""
