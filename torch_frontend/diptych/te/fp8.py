"""`quantization` by its earlier name."""

from diptych.te import absent
from diptych.te.quantization import autocast as autocast
from diptych.te.quantization import fp8_autocast as fp8_autocast
from diptych.te.quantization import fp8_model_init as fp8_model_init
from diptych.te.quantization import get_default_recipe as get_default_recipe
from diptych.te.quantization import is_fp8_available as is_fp8_available
from diptych.te.quantization import is_fp8_block_scaling_available as is_fp8_block_scaling_available
from diptych.te.quantization import is_mxfp8_available as is_mxfp8_available
from diptych.te.quantization import is_nvfp4_available as is_nvfp4_available
from diptych.te.quantization import quantized_model_init as quantized_model_init

__getattr__ = absent.attributes_of(__name__)
