"""Ranks as Ray actors on placement groups. The only package that imports ray."""
