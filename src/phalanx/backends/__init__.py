"""Backends: the interface to worker processes, and its implementations."""
