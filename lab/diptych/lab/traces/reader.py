"""Reads traces from disk. Opening a trace parses its records; values are mapped when they are first used.

Nothing in a trace is trusted: a file that differs from what the writer makes raises TraceError, and links inside of the
folder are not followed. The trace of a run that was killed has all steps that were complete.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import NamedTuple

from diptych.lab import files
from diptych.lab.traces import tensor_file
from diptych.lab.traces.schema import Meta, Record, Site, Step, TraceError, load
from diptych.lab.traces.tensor_file import Tensor

META, STEPS = "meta.json", "steps.jsonl"
LONGEST_LINE = 2**26
_OPEN_FILES = 8


def step_name(step: int) -> str:
    """Returns the name of the file with a step's values."""
    return f"step-{step:05d}.safetensors"


def rank_name(rank: int) -> str:
    """Returns the name of a rank's folder."""
    return f"rank{rank}"


class Values(NamedTuple):
    """The values of a site in a step. `tensor`: mapped from the file; the whole tensor in its shape, or a flat sample
    if not `whole`."""

    tensor: Tensor
    whole: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The record of one site in one step of one rank. `hash_name`: the function that made the hash."""

    site: Site
    record: Record
    step: int
    hash_name: str
    rank: Rank

    @property
    def values(self) -> Values | None:
        """The values that the trace holds, or None. **Raises** TraceError if their file is missing or damaged."""
        if self.record.values == "none":
            return None
        return Values(self.rank._tensors(self.step)[self.site.key], self.record.values == "whole")


class Rank:
    """The records of one process. `torn`: whether an incomplete last line, of an interrupted step, was left out."""

    def __init__(self, folder: pathlib.Path, meta: Meta) -> None:
        self.folder = folder
        self.torn = False
        self._meta = meta
        self._sites: list[Site] = []
        self._steps: dict[int, tuple[Record, ...]] = {}
        self._mapped: collections.OrderedDict[int, dict[str, Tensor]] = collections.OrderedDict()
        if files.kind(folder / STEPS) != "nothing":
            self._read_steps(folder / STEPS)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are complete, in increasing order."""
        return list(self._steps)

    def step(self, step: int) -> list[Observation]:
        """Returns a step's observations in the order of computation. **Raises** KeyError if there is no such step."""
        records = self._steps[step]
        return [Observation(self._sites[r.site], r, step, self._meta.hash, self) for r in records]

    def release(self) -> None:
        """Gives back the memory of mapped values, which are read again from the files when they are next used."""
        for tensors in self._mapped.values():
            tensor_file.release(tensors)

    def _read_steps(self, path: pathlib.Path) -> None:
        try:
            with files.reading(path, links=False) as f:
                number = 0
                while line := f.readline(LONGEST_LINE):
                    number += 1
                    if line.endswith(b"\n"):
                        self._add(load(Step, line, f"{path}: line {number}"), f"{path}: line {number}")
                    elif len(line) == LONGEST_LINE:
                        raise TraceError(f"{path}: line {number}: is longer than {LONGEST_LINE} bytes")
                    else:
                        self.torn = True
        except files.FileError as e:
            raise TraceError(str(e)) from None

    def _add(self, step: Step, where: str) -> None:
        last = next(reversed(self._steps), -1)
        if step.step <= last:
            raise TraceError(f"{where}: step: {step.step} does not follow step {last}")
        self._sites += step.sites
        check_records(step, self._sites, where)
        self._steps[step.step] = step.records

    def _tensors(self, step: int) -> dict[str, Tensor]:
        if step not in self._mapped:
            path = self.folder / step_name(step)
            found = tensor_file.read(path)
            _check_tensors(path, found, self.step(step))
            self._mapped[step] = found
            if len(self._mapped) > _OPEN_FILES:  # each mapped file keeps a descriptor open
                self._mapped.popitem(last=False)
        return self._mapped[step]


class Trace:
    """A trace on disk. `ranks`: the ranks that have begun to record, by number."""

    def __init__(self, folder: pathlib.Path, meta: Meta, ranks: Mapping[int, Rank]) -> None:
        self.folder, self.meta, self.ranks = folder, meta, ranks

    @classmethod
    def open(cls, folder: str | pathlib.Path) -> Trace:
        """Opens the trace in a folder. **Raises** TraceError that names the file and the fault."""
        folder = pathlib.Path(folder)
        try:
            with files.reading(folder / META, links=False) as f:
                text = f.read(LONGEST_LINE)
            meta = load(Meta, text, str(folder / META))
            ranks = {}
            for entry in folder.iterdir():
                found = re.fullmatch(r"rank(\d{1,7})", entry.name, re.ASCII)
                if found and rank_name(int(found[1])) == entry.name:
                    ranks[int(found[1])] = entry
        except OSError as e:
            raise TraceError(str(e) if isinstance(e, files.FileError) else f"{folder}: cannot be read: {e}") from None
        for number, path in sorted(ranks.items()):
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise TraceError(f"{path}: is {'a link' if path.is_symlink() else files.kind(path)}, not a folder")
            if number >= meta.ranks:
                raise TraceError(f"{path}: {folder / META} says that ranks are 0 to {meta.ranks - 1}")
        return cls(folder, meta, {number: Rank(path, meta) for number, path in sorted(ranks.items())})

    @property
    def steps(self) -> list[int]:
        """The steps that all ranks have completed, in increasing order."""
        if len(self.ranks) < self.meta.ranks:
            return []
        return sorted(set.intersection(*(set(rank.steps) for rank in self.ranks.values())))


def check_records(step: Step, sites: list[Site], where: str) -> None:
    """**Raises** TraceError if the records of a step contradict its sites or each other."""
    seen: set[str] = set()
    for i, record in enumerate(step.records):
        if record.site >= len(sites):
            raise TraceError(f"{where}: records[{i}].site: is {record.site}, there are {len(sites)} sites")
        site = sites[record.site]
        if site.key in seen:
            raise TraceError(f"{where}: records[{i}].site: {site.key} has two records in a step")
        none_of_some = record.values == "sampled" and not record.count and site.size
        if none_of_some or record.count > site.size or (record.values == "whole" and record.count != site.size):
            raise TraceError(f"{where}: records[{i}].count: is {record.count} of {site.size} elements")
        for name in site.inputs or ():
            if name not in seen:
                raise TraceError(
                    f"{where}: records[{i}].site: {site.key} has an input {name[:100]!r}, not recorded before"
                )
        seen.add(site.key)


def _check_tensors(path: pathlib.Path, tensors: dict[str, Tensor], observations: list[Observation]) -> None:
    kept = {r.site.key: r for r in observations if r.record.values != "none"}
    if tensors.keys() != kept.keys():
        name = min(tensors.keys() ^ kept.keys())
        found = f"is not in {STEPS}" if name in tensors else f"is missing; {STEPS} has it"
        raise TraceError(f"{path}: tensor {name[:200]!r}: {found}")
    for key, tensor in tensors.items():
        site, record = kept[key].site, kept[key].record
        shape = site.shape if record.values == "whole" else (record.count,)
        if (tensor.dtype.name, tensor.bits.shape) != (site.dtype, shape):
            held = f"{tensor.dtype.name}{list(tensor.bits.shape)}"
            raise TraceError(f"{path}: tensor {key!r}: is {held}, {STEPS} says {site.dtype}{list(shape)}")
