"""Stages are seen on standard error: lines where it is no terminal, bars where it is one, nothing if asked."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from diptych.lab import progress
from diptych.lab.progress import SILENT, Progress


class Stream(io.StringIO):
    """A standard error that says when a text was written to it."""

    def __init__(self, terminal: bool, awaited: str) -> None:
        super().__init__()
        self._terminal, self._awaited, self.written = terminal, awaited, threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._awaited in self.getvalue():
            self.written.set()
        return count


def shown(monkeypatch, terminal, awaited, **stage):
    """Returns what a stage of two steps shows, one of which was advanced."""
    stream = Stream(terminal, awaited)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    with Progress("diptych compare").stage("torch mxfp8", **stage) as at:
        at.advance("loss 2.000")
        assert stream.written.wait(20), stream.getvalue()
    return stream.getvalue()


def test_lines_where_no_terminal_is(monkeypatch):
    text = shown(monkeypatch, False, "1 of 2", total=2)
    assert re.search(r"^diptych compare: torch mxfp8: 1 of 2 steps, loss 2\.000; \d+ s$", text, re.MULTILINE)
    assert "\r" not in text


def test_a_line_of_a_stage_without_a_count(monkeypatch):
    assert re.search(
        r"^diptych compare: torch mxfp8: loss 2\.000; \d+ s$", shown(monkeypatch, False, "2.0"), re.MULTILINE
    )


def test_bars_on_a_terminal(monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm draws the bars")
    text = shown(monkeypatch, True, "1/2", total=2, stays=True)
    assert "torch mxfp8" in text and "loss 2.000" in text and "\r" in text


def test_lines_on_a_terminal_without_tqdm(monkeypatch):
    monkeypatch.setattr(progress, "_tqdm", lambda: None)
    assert "1 of 2 steps" in shown(monkeypatch, True, "1 of 2", total=2)


def test_an_earlier_runs_steps_count(monkeypatch):
    assert "6 of 9 tensors" in shown(monkeypatch, False, "6 of", total=9, done=5, unit="tensors")


@pytest.mark.parametrize("quiet", [SILENT, Progress("diptych diff", quiet=True)])
def test_quiet_shows_nothing(quiet, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    before = threading.active_count()
    with quiet.stage("reading", 3) as at:
        at.advance()
        assert threading.active_count() == before
    assert capsys.readouterr() == ("", "")


def test_a_stage_ends_with_its_errors(monkeypatch, capsys):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress("diptych diff").stage("reading"):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_a_process_without_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("diptych diff").stage("reading", 1) as at:
        at.advance()
    assert at.done == 1
