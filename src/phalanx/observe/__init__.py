"""Show what a run did, in text and figures, while it runs and afterwards: report, comparison, live display.

Only the run directory is read. `phalanx report` and `phalanx compare` are thin layers over this package.
"""
