"""The lab's adapter for JAX: its model, its training step and its traces."""
