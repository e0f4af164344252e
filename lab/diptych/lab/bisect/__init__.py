"""Bisection of two models: A's activations are fed into B until the module is found that makes a difference."""
