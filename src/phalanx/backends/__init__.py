"""Backends: the interface by which ranks are reached, and its implementations."""
