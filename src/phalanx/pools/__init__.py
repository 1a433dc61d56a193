"""Resource pools: reserved slots, and the groups on them."""
