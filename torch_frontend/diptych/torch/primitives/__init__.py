"""Ops of the core as torch ops: what they take, what they return, and how they are registered."""
