"""Helpers that verl's tutorial imports."""
