"""What a training step carries: scales, and the ways in which they travel."""
