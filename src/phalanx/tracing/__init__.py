"""Traces and metrics: events of calls that are recorded, merged, and written to files and reports."""
