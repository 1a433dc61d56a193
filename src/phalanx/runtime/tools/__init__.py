"""What looks at groups and their calls: traces, profiles, explanations."""
