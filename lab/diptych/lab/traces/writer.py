"""Writes a trace on disk, step by step, so that a process that is killed leaves a readable trace of all complete steps.

A step's values are written to a temporary file, which is renamed when it is complete; only then is the step's line
appended to steps.jsonl. A reader leaves out a last line without a newline. Each rank writes in a folder of its own, and
rank 0 writes meta.json.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diptych.common.files import FileError, replacing
from diptych.lab.traces import tensor_file
from diptych.lab.traces.dtypes import bits_of
from diptych.lab.traces.reader import LONGEST_LINE, META, STEPS, check_records, rank_name, step_name
from diptych.lab.traces.sampling import SAMPLES, Budget, Plan, places
from diptych.lab.traces.schema import Meta, Record, Site, Statistics, Step, TraceError, dump
from diptych.lab.traces.tensor_file import Tensor


class Entry(NamedTuple):
    """A site in a step, as a frontend hands it to `Writer.step`.

    `hash`: the hash of the tensor's bits, 32 hexadecimal digits. `values`: the whole tensor in its shape, or the flat
    sample that `Writer.plan` asks for, at `places(site.size, count)`; its elements have the site's dtype, or are its
    bits as unsigned integers. The writer ignores `values` where the plan keeps none. Where the plan asks for the whole
    tensor, a flat sample of `SAMPLES` elements is kept instead, with `cut` set: a frontend that learns a step's sites
    while the step runs may have no more.
    """

    site: Site
    statistics: Statistics | None = None
    hash: str | None = None
    values: np.ndarray | None = None


class Writer:
    """Writes the records of one rank. Every method **raises** TraceError for records that a reader would refuse, and
    FileError if the disk fails; the trace then lacks that step."""

    def __init__(self, folder: str | pathlib.Path, meta: Meta, rank: int = 0) -> None:
        """Begins a rank's part of the trace in `folder`. **Raises** TraceError if the folder has one for this rank
        already."""
        if not 0 <= rank < meta.ranks:
            raise TraceError(f"{folder}: rank {rank} is not one of {meta.ranks}")
        self.folder = pathlib.Path(folder)
        self.meta = meta
        self._rank = rank
        self._path = self.folder / rank_name(rank)
        self._budget = Budget(meta.options, meta.ranks)
        self._sites: dict[Site, int] = {}
        self._last = -1
        text = dump(meta)
        try:
            self._path.mkdir(parents=True)
            path = self._path / STEPS
            self._lines = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise TraceError(f"{self._path}: is there; a trace needs a new folder") from None
        except OSError as e:
            raise FileError(e.errno, f"{self._path}: cannot be written: {e.strerror}") from e
        self._replace_meta(text)

    def plan(self, sites: Sequence[Site]) -> list[Plan]:
        """Returns the plan of each site for the next step, if it has these sites in this order. The plan depends on the
        options, the sites and the earlier steps, not on values."""
        return self._budget.plan(sites)

    def budget(self) -> Budget:
        """Returns a copy of what is left for values, with which a frontend can predict a plan site by site."""
        return copy.copy(self._budget)

    def step(self, step: int, entries: Sequence[Entry]) -> None:
        """Writes a step. `entries`: in the order of computation, so that a site's inputs come before it.

        **Raises** ValueError if values that the plan keeps are missing or have another shape, TypeError if they have
        another dtype.
        """
        if step <= self._last:
            raise TraceError(f"{self._path / STEPS}: step {step} does not follow step {self._last}")
        plans = [_possible(e, p) for e, p in zip(entries, self.plan([e.site for e in entries]), strict=True)]
        new = [s for s in dict.fromkeys(e.site for e in entries) if s not in self._sites]
        sites = self._sites | {site: len(self._sites) + i for i, site in enumerate(new)}
        records = tuple(
            Record(sites[e.site], e.statistics, e.hash, p.values, p.count, p.cut)
            for e, p in zip(entries, plans, strict=True)
        )
        line = Step(step, tuple(new), records)
        where = f"{self._path / STEPS}: step {step}"
        check_records(line, list(sites), where)
        text = dump(line)
        if len(text) >= LONGEST_LINE:
            raise TraceError(f"{where}: its line has {len(text)} bytes, more than {LONGEST_LINE}")
        values = {e.site.key: _kept(e, p) for e, p in zip(entries, plans, strict=True) if p.values != "none"}
        if values:
            tensor_file.write(self._path / step_name(step), values)
        self._append(text)
        self._budget.take([e.site for e in entries], plans)
        self._sites, self._last = sites, step

    def note(self, **known: Any) -> None:
        """Replaces fields of meta.json that become known during the run, such as `recipe`; only rank 0 writes the
        file."""
        if any(getattr(self.meta, name) != value for name, value in known.items()):
            self.meta = dataclasses.replace(self.meta, **known)
            self._replace_meta(dump(self.meta))

    @property
    def closed(self) -> bool:
        return self._lines < 0

    def close(self) -> None:
        if self._lines >= 0:
            os.close(self._lines)
            self._lines = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace_meta(self, text: bytes) -> None:
        if self._rank == 0:
            with replacing(self.folder / META) as f:
                f.write(text)

    def _append(self, text: bytes) -> None:
        """Appends a whole line, or nothing if it is interrupted."""
        size, left = os.fstat(self._lines).st_size, memoryview(text)
        try:
            while left:
                left = left[os.write(self._lines, left) :]
        except OSError as e:
            raise FileError(e.errno, f"{self._path / STEPS}: cannot be written: {e.strerror}") from e
        finally:
            if left:
                os.ftruncate(self._lines, size)


def _possible(entry: Entry, plan: Plan) -> Plan:
    sampled = entry.values is not None and entry.values.shape == (SAMPLES,) != entry.site.shape
    return Plan("sampled", SAMPLES, True) if plan.values == "whole" and sampled else plan


def _kept(entry: Entry, plan: Plan) -> Tensor:
    site, values = entry.site, entry.values
    if values is None:
        raise ValueError(f"{site.key}: its values are missing, the plan keeps {plan.count} of them")
    form, bits = bits_of(values, site.dtype)
    if bits.shape == site.shape:
        return Tensor(form, bits if plan.values == "whole" else bits.reshape(-1)[places(site.size, plan.count)])
    if plan.values != "sampled" or bits.shape != (plan.count,):
        raise ValueError(f"{site.key}: its values have shape {list(bits.shape)}, the site has {list(site.shape)}")
    return Tensor(form, bits)
