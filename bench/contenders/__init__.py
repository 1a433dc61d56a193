"""What is compared: each contender lives in a process of its own and speaks `bench.protocol`."""
