"""The session of a driver: its connection to a cluster and its background threads."""
