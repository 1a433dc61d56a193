"""Slots that are reserved, and by whom."""
