"""State of a training step: delayed scales, regions of `autocast`, checkpoints."""
