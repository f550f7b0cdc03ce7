"""Backends that run jobs, all by the contract of `jobs/backends/base.py`. Each has its own module or package,
independent of the others; third-party packages are imported on use."""
