"""Slots, meshes, placement and device masks of ranks. Pure: values without IO."""
