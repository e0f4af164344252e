"""The modules that users build models of, and what converts, saves and inspects these."""
