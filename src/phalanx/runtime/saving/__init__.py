"""Saves of groups: ``group_save`` (one group's part of a step), ``group_load``, and the verbs over them."""
