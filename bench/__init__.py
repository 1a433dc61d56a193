"""The benchmark of the data plane and the control path: `python bench/run.py --help`."""
