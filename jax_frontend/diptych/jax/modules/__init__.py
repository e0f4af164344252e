"""The room of whole models: modules for each framework over JAX, files that models are saved to, remat policies."""
