"""Workers and layers for model parallelism."""
