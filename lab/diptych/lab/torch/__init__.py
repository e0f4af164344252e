"""The lab for torch: the capture of any model, and the adapter that trains the demo model."""

from diptych.lab.torch.capture import Capture, capture

__all__ = ["Capture", "capture"]
