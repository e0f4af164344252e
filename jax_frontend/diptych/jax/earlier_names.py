"""Module paths of earlier versions, which pickled parameters and states refer to."""

from diptych.common.earlier_names import keep
from diptych.jax.state import scales
from diptych.jax.tensors import quantized


def keep_earlier_names() -> None:
    """Lets `pickle` find classes under the module paths of earlier versions."""
    keep(
        {
            "diptych.jax.grouped.QuantizedStack": quantized.QuantizedStack,
            "diptych.jax.quantized.QuantizedArray": quantized.QuantizedArray,
            "diptych.jax.state.ScaleState": scales.ScaleState,
        }
    )
