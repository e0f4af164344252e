"""Quantized tensors and stacks, and the copies that products read."""
