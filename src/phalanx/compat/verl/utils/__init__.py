"""Helpers that code written for verl imports beside the groups, at the same paths."""
