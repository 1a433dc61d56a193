"""What flows between groups while they run: channels, bounded staleness, routing, streamed rows. Pure.

Each is a machine of values: `handle(event, now) -> list of instructions`, or a function. None of them starts a
thread, reads a clock or touches a payload; the rooms of `phalanx.runtime.links` send the events, own the clock
and act on the instructions.
"""
