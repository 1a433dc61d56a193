"""Code of a worker process."""
