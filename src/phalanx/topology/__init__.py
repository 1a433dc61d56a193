"""Where ranks live and how they are named: slots, meshes, placement, device masks. Pure values, no IO."""
