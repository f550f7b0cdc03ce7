"""Forms of an export other than plain weights: a module for each."""

from phalanx.train.checkpoint.export_forms.compressed_tensors import QuantizedForm
from phalanx.train.checkpoint.export_forms.fp8 import FP8_FORM
from phalanx.train.checkpoint.export_forms.int4 import INT4_FORM

QUANTIZED_FORMS: dict[str, QuantizedForm] = {"fp8": FP8_FORM, "int4": INT4_FORM}
"""Forms with quantized weights, by the name that users give."""
