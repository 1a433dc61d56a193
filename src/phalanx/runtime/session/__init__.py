"""The process's connection to a cluster, and what runs in the background of it."""
