"""Drop-in names of other libraries."""
