"""Where earlier versions kept the classes that pickled parameters and states name."""

from diptych.common.earlier_names import keep
from diptych.jax.state import scales
from diptych.jax.tensors import quantized


def keep_earlier_names() -> None:
    """For `pickle`."""
    arrays = {f"diptych.jax.quantized.{name}": getattr(quantized, name) for name in ("QuantizedArray",)}
    keep(arrays | {"diptych.jax.state.ScaleState": scales.ScaleState})
