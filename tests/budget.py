"""Processor time of tests: each one's own and of the programs that it waited for, with its setup and teardown.

At the end of a run the total is printed, and the tests that took the most. A test above SECONDS that no row of
EXCEPTIONS allows is named. It does not fail: the same test takes twice the time on a slower or busier processor, and
what a session's first test starts (Inductor's compiler, a pool of ranks, a fixture of the session) counts as its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest

SECONDS = 5.0  # of processor time a test
SHOWN = 20
EXCEPTIONS = {  # beginnings of ids, and why
    "tests/architecture/test_counts.py::test_figures_keep_their_bounds": "parses all sources, imports torch",
    "tests/jax_frontend/sharding/test_partition_processes.py": "two processes import JAX",
    "tests/jax_frontend/sharding/test_partition_section.py": "compiles the step of a stack, whole and cut",
    "tests/jax_frontend/test_llama_example.py::test_losses_are_those_of_torch": "trains a Llama in both frameworks",
    "tests/lab/diff/test_operations.py::test_a_port_that_is_right_and_one_that_is_not": "captures four models",
    "tests/lab/in_torch/test_capture_compiled.py": "Inductor's first compilation in a worker may be its own",
    "tests/lab/test_compare.py": "a worker's first test here trains four models, for all of them",
    "tests/lab/test_first_steps.py::test_every_linear_has_all_its_operations": "captures steps for its file",
    "tests/test_benchmarks.py::test_results_are_right_where_a_section_measures[several": "ranks import torch",
    "tests/test_examples.py::test_code_on_pages_runs": "a process imports torch, Inductor and JAX",
    "tests/torch_frontend/distributed/test_checkpoint.py::test_two_ranks_resume": "the first call of the ranks",
    "tests/torch_frontend/distributed/test_gather_quantized.py::test_same_bits_as_one": "ranks compile first here",
    "tests/torch_frontend/distributed/test_gather_quantized_hsdp.py": "four ranks start",
    "tests/torch_frontend/state/test_checkpoint_adopted.py::test_around_compiled_code": "twelve trainings, four graphs",
    "tests/torch_frontend/layers/test_weight_gradients_reduced.py::test_compiled_ones": "ranks compile first here",
}
elsewhere = 0.0  # seconds of programs that nobody here waits for, which answered how long they took


def used() -> float:
    """Returns the seconds of this process, of the children that it waited for, and those that `elsewhere` counts."""
    return sum(os.times()[:4]) + elsewhere


class Budget:
    """The plugin. A worker measures and its reports carry the times; the run's own process adds and prints them."""

    def __init__(self, config: pytest.Config):
        self.config, self.at, self.others = config, 0.0, 0.0
        self.by_test: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logstart(self) -> None:
        self.at = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = used()
        report.user_properties.append(("processor", now - self.at))
        self.at = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_test[report.nodeid] += sum(seconds for name, seconds in report.user_properties if name == "processor")

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["processor"] = used()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.others += getattr(node, "workeroutput", {}).get("processor", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(self.config, "workeroutput") or not self.by_test:
            return
        tests = sorted(self.by_test.items(), key=lambda each: -each[1])
        own = sum(os.times()[:2]) if self.others else used()  # workers are children that have ended by now
        said = terminalreporter
        said.section("processor time")
        said.line(f"{(self.others + own) / 60:.1f} minutes, {sum(self.by_test.values()) / 60:.1f} of them in tests")
        for name, seconds in tests[:SHOWN]:
            said.line(f"{seconds:6.1f} s  {name}")
        for name, seconds in tests:
            if seconds > SECONDS and not name.startswith(tuple(EXCEPTIONS)):
                said.line(f"above {SECONDS:g} s: {name} took {seconds:.1f} s", yellow=True)
