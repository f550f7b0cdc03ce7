"""The web page: runs, jobs and nodes, live; metrics for Prometheus. Reads run directories, the queue and agents."""
