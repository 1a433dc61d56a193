"""Membership: ranks start, restart, are replaced, join and leave."""
