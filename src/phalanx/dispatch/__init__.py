"""From a declared method and the caller's arguments to a plan of the call. Pure."""
