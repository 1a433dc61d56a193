"""How long the steps of calls and starts take, and where each number is from. ``bench/calibrate.py`` measures them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Constants:
    """What the model of a cluster multiplies by: seconds, and bytes a second.

    The defaults are for one machine of 2 cores under Ray 2.60: what ``bench/calibrate.py`` fitted to groups of 8 and 16
    ranks there, with swept caches. What is between nodes is assumed, since there was no network.
    """

    # The driver's CPU for each rank of a call. It is one thread: ranks wait their turn.
    submit_s: float = 0.17e-3
    """To make and to send the message of one rank."""
    take_s: float = 0.14e-3
    """To take the output of one rank."""
    put_s: float = 2.2e-3
    """To store one object."""
    call_s: float = 0.24e-3
    """For a call, however many ranks it has."""

    # CPU of a rank's node, whose cores its ranks share.
    handle_s: float = 0.56e-3
    """For one call of one rank, beside the method itself: wake, encode, answer."""
    process_s: float = 0.63
    """To start one process, as far as it reports where it is. As many as a node has cores are there before."""
    setup_s: float = 0.18
    """To make a process a rank, beside the constructor itself: imports, the environment."""
    start_s: float = 0.0
    """For a start, however many processes it has; nothing is busy meanwhile."""
    create_s: float = 2.0e-3
    """Of the driver and the cluster's controller, one after another, to ask for one process."""
    store_bytes_per_s: float = 3.5e9
    """Copying a value into the object store of a node."""
    copy_bytes_per_s: float = 5.9e9
    """Copying a value out of it into a rank's own memory, per core."""
    message_bytes_per_s: float = 0.5e9
    """What travels inside a message or a small output."""

    # Between nodes: assumed.
    latency_s: float = 0.1e-3
    """One message, from a process to another."""
    network_bytes_per_s: float = 10e9
    """One node's link, in each direction."""

    argument_s: float = 0.36e-3
    """More CPU of a rank's node for a call that has arguments."""
    get_s: float = 0.64e-3
    """CPU of a rank's node to get one stored value for it, beside copying it."""
    idle_s: float = 6.0e-3
    """CPU of its node that each process takes in every second, called or not: threads of Ray's that look after it."""

    # Relays of large groups: a process each, on a node of their ranks, whose cores it shares with them. Measured on the
    # same machine with 8 and 16 ranks below one relay, whose caches were swept before each call.
    relay_call_s: float = 1.8e-3
    """CPU of a relay for a call, however many are below it: wake, decode, wait, answer."""
    relay_send_s: float = 0.17e-3
    """CPU of a relay for each rank or relay below it that it sends a message."""
    relay_take_s: float = 0.14e-3
    """CPU of a relay to take each one's output."""
    relayed_rank_s: float = 5.0e-6
    """The driver's CPU for each rank of a call that goes through relays."""

    @staticmethod
    def names() -> tuple[str, ...]:
        """What there is to be set."""
        return tuple(field.name for field in fields(Constants))
