"""Benchmarks: project and peer side by side in one run; results as JSON under benchmarks/results/<device>/."""
