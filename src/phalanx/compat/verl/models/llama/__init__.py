"""Layers of models that verl's tutorial imports."""
