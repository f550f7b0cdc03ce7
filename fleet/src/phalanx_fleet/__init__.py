"""Operate nodes: what they draw, how warm they are, whether they are fit for work."""
