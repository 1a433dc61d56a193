"""Changes of membership: start, restart, replacement and resizing of ranks."""
