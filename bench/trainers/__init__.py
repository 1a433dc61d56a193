"""verl's own trainers on a machine without accelerators: small models, command lines, metrics of runs."""
