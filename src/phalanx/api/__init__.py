"""Handles that users hold: groups, views, methods."""
