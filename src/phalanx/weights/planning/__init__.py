"""Resharding plans: boxes, manifests, buckets, digests and deltas. Pure but for the readers of models."""
