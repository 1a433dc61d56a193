"""Where ranks are: meshes, slots, placement. Pure values; nothing here touches a cluster."""
