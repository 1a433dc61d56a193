"""Plan a call, given the declared method and the caller's arguments. Pure."""
