"""Ops of the core as JAX primitives: their operands and results, and how XLA calls them."""
