"""The pairs need Flax's models, which transformers had until its version 4: `make lab-pairs` installs it."""

import importlib.metadata
import pathlib

from elsewhere import skipped_here


def _missing():
    """Returns why the tests cannot run here, or None."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.startswith("4."):
        return None
    found = f"transformers {version} has no Flax models" if version else "transformers is not installed"
    return f"{found}; `make lab-pairs` runs these tests"


pytest_pycollect_makemodule = skipped_here(pathlib.Path(__file__).parent, _missing)
