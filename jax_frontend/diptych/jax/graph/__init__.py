"""A traced function as a graph: its arguments as flat arrays, taps in it, and its evaluation with observations."""
