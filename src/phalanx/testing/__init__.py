"""Helpers for tests of code that uses Phalanx, and the conformance suite of transports."""
