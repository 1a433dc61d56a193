"""Weight transports: the interface, and an implementation for each distance."""
