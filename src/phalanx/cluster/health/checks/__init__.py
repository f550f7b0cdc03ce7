"""Health checks of a node, one module a family."""
