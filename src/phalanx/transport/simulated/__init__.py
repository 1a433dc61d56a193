"""A cluster that is not there: its processes, cores and wires are queues of events on a clock of their own."""
