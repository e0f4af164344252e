"""Benchmarks of the project and of peers in one run, with results as JSON under benchmarks/results/<device>/."""
