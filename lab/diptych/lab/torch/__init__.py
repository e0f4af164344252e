"""The lab for torch: capture of any model; and its adapter: the demo model and its training step."""

from diptych.lab.torch.capture import Capture, capture

__all__ = ["Capture", "capture"]
