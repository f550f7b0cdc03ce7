"""Optimizers of the recipe: which parameter is updated by which, and their state under logical names."""
