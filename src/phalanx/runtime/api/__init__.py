"""What users hold: groups, views, methods."""
