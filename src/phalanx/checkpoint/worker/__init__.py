"""The part of saves and loads that runs on ranks."""
