"""Tables, progress and output of ranks for people; records for the commands, and numbers for metrics."""
