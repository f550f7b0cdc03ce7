"""Optimizers of the recipe: which parameter is updated by which, and their state under logical names.

`container.py` builds and combines them; the other modules are optimizers and storage of their state.
"""
