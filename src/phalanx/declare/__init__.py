"""Declarations of users on their classes, as values: methods, modes, workers, roles."""
