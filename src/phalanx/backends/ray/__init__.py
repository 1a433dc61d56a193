"""The backend on Ray."""
