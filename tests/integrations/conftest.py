"""The tests need other projects' trainers: `make integrations` installs them beside the project's own packages."""

import importlib.util
import os
import pathlib

from elsewhere import skipped_here

_PACKAGES = ("accelerate", "datasets", "diffusers", "lightning", "peft", "timm", "torchtitan", "trl")


def _missing():
    """Returns why the tests cannot run here, or None."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; `make integrations` runs these tests" if missing else None


if not _missing():
    os.environ["HF_HUB_OFFLINE"] = "1"  # every model, tokenizer and text is made in the test
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from integrations import torchvision_ops  # noqa: F401 - before anything imports torchvision


pytest_pycollect_makemodule = skipped_here(pathlib.Path(__file__).parent, _missing)
