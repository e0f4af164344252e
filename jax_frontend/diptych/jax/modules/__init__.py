"""What whole models need: modules of frameworks over JAX, one file each, and how models are saved and recomputed."""
