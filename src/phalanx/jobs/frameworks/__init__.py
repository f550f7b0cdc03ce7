"""Environments and launchers of other frameworks' processes."""
