"""The part of TransformerEngine's package `common` that users import: `recipe`."""

from diptych.te.common import recipe as recipe
