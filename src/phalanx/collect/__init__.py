"""Collect: values of a call on its rank, and the outcomes of all ranks as a single value or error. No backend."""
