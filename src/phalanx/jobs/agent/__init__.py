"""The agent of a node, and the fork server of its workers."""
