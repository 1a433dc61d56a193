"""How calls reach ranks: the few verbs that a backend provides, and the backends."""
