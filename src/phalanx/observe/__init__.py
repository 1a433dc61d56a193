"""What happened and where: events, tables, exporters."""
