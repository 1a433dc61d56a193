"""The contenders: each lives in its own process and speaks `bench.protocol`."""
