"""Text output: tables, progress, logs."""
