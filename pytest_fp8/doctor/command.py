"""``pytest-fp8 doctor``: its arguments, its text and its JSON."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import TextWrapper
from typing import Any

from pytest_fp8.doctor.line import OK, PROBLEM, Line
from pytest_fp8.libraries import library_versions

DESCRIPTION = """\
Say what this machine can do for FP8 training: GPU, recipes, libraries, cuDNN, memory, clocks and neighbours, and one
real FP8 product in each library. Exit 0: nothing is in the way; 1: something is.
"""
WIDTH = 100
"""Columns of a line."""
INDENT = " " * 21
SCHEMA = 1


def add_doctor(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("doctor", help="what this machine can do", description=DESCRIPTION)
    add.add_argument("--json", action="store_true", help="JSON instead of text")
    add.add_argument("--no-products", action="store_true", help="start no process and compute no product")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = list(findings(products=not options.no_products))
    problems = sum(finding.state == PROBLEM for finding in found)
    if options.json:
        told = {"schema": SCHEMA, "ok": not problems, "findings": [asdict(finding) for finding in found]}
        print(json.dumps(told, indent=2))
        return int(problems > 0)
    print("\n".join(lines_of(found)))
    print(f"\n{problems} problem(s)" if problems else "\nno problems")
    return int(problems > 0)


def lines_of(found: Sequence[Line]) -> Iterator[str]:
    """The findings as text. What to do next is often a command: whoever copies it needs it in one piece. Several
    findings may have the same one, which is said once."""
    topic, told = "", set()
    for finding in found:
        head = f"{'' if finding.topic == topic else finding.topic:<11} {finding.state:<8} "
        wrap = TextWrapper(
            WIDTH, initial_indent=head, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
        )
        yield from wrap.wrap(f"{finding.code}: {finding.text}" if finding.code else finding.text)
        if finding.next_step and finding.state != OK and finding.next_step not in told:
            yield f"{INDENT}next: {finding.next_step}"
            told.add(finding.next_step)
        topic = finding.topic


def findings(products: bool) -> Iterator[Line]:
    """Everything, in the order in which a person would look."""
    from pytest_fp8.doctor.libraries import cudnn_findings, library_findings
    from pytest_fp8.doctor.machine import condition_findings, gpu_findings, memory_findings, recipe_findings
    from pytest_fp8.doctor.products import product_findings
    from pytest_fp8.gpu import detect

    version = library_versions(["pytest-fp8"]).get("pytest-fp8", "(not installed)")
    yield Line("machine", OK, f"pytest-fp8 {version}, Python {platform.python_version()}, {platform.platform()}")
    gpu, absent = detect()
    yield from gpu_findings(gpu, absent)
    if gpu is not None:
        yield from condition_findings(gpu)
    yield from library_findings()
    if gpu is not None:
        yield from cudnn_findings()
    yield from recipe_findings(gpu)
    if gpu is not None and gpu.chip:
        yield from memory_findings(gpu)
    if products and (gpu is None or gpu.chip):
        yield from product_findings(gpu)
