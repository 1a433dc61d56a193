"""Collect: turn the outcomes of all ranks into a single value or error. Pure."""
