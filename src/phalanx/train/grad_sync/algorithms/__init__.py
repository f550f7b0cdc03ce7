"""Algorithms of gradient synchronization, one a module."""
