"""Pools, groups and futures: what users hold on the driver."""
