"""Random calls and files, each a function of (seed, number): `python -m fuzz` runs them; see `fuzz.__main__`."""
