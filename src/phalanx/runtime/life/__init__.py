"""The life of a group: options, lifecycle, epochs."""
