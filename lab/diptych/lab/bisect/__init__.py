"""The bisection of two models, which feeds A's activations into B to find the first module that makes a difference."""
