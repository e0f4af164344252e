"""Computes recorded operations again, in another framework or on another device, and judges what comes out."""
