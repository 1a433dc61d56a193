"""What all views of a group share, and how a group starts."""
