"""Declarations on users' classes, as values: methods, dispatch modes, workers, roles."""
