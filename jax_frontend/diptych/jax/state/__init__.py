"""Delayed scales as values that training steps pass on, and the ways in which they travel through gradients."""
