"""Algorithms of gradient synchronization, one per module."""
