"""Replay computes recorded operations again, in another framework or on another device, and judges their results."""
