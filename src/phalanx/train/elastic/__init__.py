"""Reconfiguration of the surviving replicas after a loss."""
