"""Adapters for fine-tuning: small trained matrices at frozen layers, and how they are merged."""
