"""The tiny job that the lab's tests train."""

from diptych.common import RECIPES
from diptych.lab.job import Job, ModelConfig, OptimConfig

TINY = ModelConfig(width=32, layers=2, heads=2, seq=16)


def job(recipe: str = "mxfp8", steps: int = 6, **more) -> Job:
    return Job(model=TINY, optim=OptimConfig(steps=steps, warmup=2), recipe=RECIPES.get(recipe), compile=False, **more)
