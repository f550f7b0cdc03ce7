"""What a run did, told in words and pictures, while it goes and afterwards: report, comparison, live display.

The run directory is all that is read. `phalanx report` and `phalanx compare` are thin layers over this room.
"""
