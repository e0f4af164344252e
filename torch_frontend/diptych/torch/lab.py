"""The lab's public names for torch: `capture` records what a model computes."""

from diptych.lab.torch.capture import Capture, capture

__all__ = ["Capture", "capture"]
