"""Events of calls: recorded, merged, and written to files and pages."""
