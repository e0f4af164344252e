"""`is_bf16_available`, under TransformerEngine's path."""

from diptych.te import absent
from diptych.torch import is_bf16_available as is_bf16_available

__getattr__ = absent.attributes_of(__name__)
