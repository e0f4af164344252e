"""What a training step remembers: scales, regions, checkpoints."""
