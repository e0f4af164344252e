"""Quantized arrays and stacks, and the copies that products read."""
