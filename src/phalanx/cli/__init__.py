"""The command line: `main` is its entry, each verb is a module."""
