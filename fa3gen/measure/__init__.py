"""How fast modules are, beside each other and beside peers; the search for faster ones."""
