"""The lab's adapter for torch: its model, its training step and its traces."""
