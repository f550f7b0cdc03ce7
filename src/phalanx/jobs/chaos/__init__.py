"""Fault injection: the faults of a seeded fault plan (`fault_plan.py`) are injected into a run (`faults.py`), which is
restarted until it is done (`launcher.py`). The verdict depends on its result and its leftovers (`verify.py`)."""
