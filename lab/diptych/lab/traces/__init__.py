"""Traces record a run's tensors at named sites on disk, in one form for every framework, and can be compared."""

from diptych.lab.traces.dtypes import DTYPES, DType, bits_of, is_recorded
from diptych.lab.traces.measure import Distance, distance, distances, tensor_distance
from diptych.lab.traces.reader import Observation, Rank, Trace, Values
from diptych.lab.traces.sampling import SAMPLES, Plan, places
from diptych.lab.traces.schema import Meta, Options, Quantization, Record, Site, Statistics, Step, TraceError
from diptych.lab.traces.statistics import quantization, statistics_of
from diptych.lab.traces.tensor_file import Tensor
from diptych.lab.traces.writer import Entry, Writer

__all__ = [
    "DTYPES",
    "SAMPLES",
    "DType",
    "Distance",
    "Entry",
    "Meta",
    "Observation",
    "Options",
    "Plan",
    "Quantization",
    "Rank",
    "Record",
    "Site",
    "Statistics",
    "Step",
    "Tensor",
    "Trace",
    "TraceError",
    "Values",
    "Writer",
    "bits_of",
    "distance",
    "distances",
    "is_recorded",
    "places",
    "quantization",
    "statistics_of",
    "tensor_distance",
]  # fmt: skip
