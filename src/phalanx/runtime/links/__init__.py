"""What joins groups: weights that go from one to another, and what else flows between them.

Weights, in the order of a sync: `weight_sync` (what users hold) -> `pairing` (once per pair of epochs: describe, plan,
make the ends) -> `sync_future` (the calls of both groups as one future) -> `versions` (what came of it).

Channels: `channel` (what users hold) -> `ports` -> the home, `channel_home`, in this process (`services`) or over a
connection (`connection` -> `server`); `payloads` (where bytes lie), `batch` (what was taken), `leaving` (how a producer
ends).
"""
