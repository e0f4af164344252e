"""How layers and verbs become nodes of a graph that torch.compile traces."""
