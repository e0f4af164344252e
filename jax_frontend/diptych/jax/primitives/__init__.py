"""Ops of the core as JAX primitives: what they take, what they return, and how XLA calls them."""
