"""Compression of gradients, with error feedback."""
