"""What people read: tables, progress, logs, what a call would do."""
