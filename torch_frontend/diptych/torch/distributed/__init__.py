"""Training on several GPUs, on torch.distributed: weights that FSDP2 gathers quantized, and checkpoints.
`diptych.torch.parallel` is its public face."""
