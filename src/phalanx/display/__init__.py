"""Display: tables, progress and output of ranks; registry records for the commands."""
