"""Calls under way: composed, waited for, ended."""
