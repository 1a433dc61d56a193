"""The state of a group."""
