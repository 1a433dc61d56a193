"""Readers of model layouts."""
