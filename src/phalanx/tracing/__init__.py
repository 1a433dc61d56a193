"""What happened, as events: recorded, merged, written to files and pages."""
