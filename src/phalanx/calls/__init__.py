"""Calls: sent, awaited and ended."""
