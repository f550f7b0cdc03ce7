"""In-memory checkpoints, replicated to peers."""
