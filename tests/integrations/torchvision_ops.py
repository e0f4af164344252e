"""Declares torchvision's ops `nms` and `qnms` where torch is built for the CPU alone.

The wheel of torchvision on PyPI is linked to torch's CUDA libraries, so that its compiled part cannot be loaded there,
and its Python part, which timm and others import, asks for these ops. Nothing here calls them.
"""

import torch

if torch.version.cuda is None:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        LIBRARY.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
