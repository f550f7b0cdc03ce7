"""Gradient synchronization between replicas: buckets, algorithms that sum them, compression."""
