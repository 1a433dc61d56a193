"""What users write on their classes, as values: methods, modes, workers, roles."""
