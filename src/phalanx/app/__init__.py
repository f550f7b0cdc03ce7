"""Use cases, one module each: the Python API."""
