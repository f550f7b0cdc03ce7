"""Calibration: measure this machine in seconds or minutes and write a cluster file.

`runner` runs the measurements, each other file measures one thing. torch is imported only in processes that measure.
"""
