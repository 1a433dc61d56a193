"""The part of a weight sync that runs on ranks."""
