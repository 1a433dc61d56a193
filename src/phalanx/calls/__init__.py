"""One call, from its plan to its value or error."""
