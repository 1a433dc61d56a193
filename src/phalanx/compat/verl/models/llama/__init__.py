"""Layers of models, of verl's earlier line."""
