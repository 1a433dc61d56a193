"""What looks at groups and their calls: traces, profiles, recordings, explanations."""
