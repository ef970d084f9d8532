"""Controls that need no arm: they break a baseline or a session."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from controls.control import Control, Outcome, control
from pytest_fp8.codes import B, R

if TYPE_CHECKING:
    from pytest_fp8.pair import Fp8Pair


class WithoutArms(Control):
    """No arm is built."""

    case = None  # type: ignore[assignment]


@control("foreign-baseline", B.UNREADABLE, "another GPU's baseline under this name", question="baseline")
class ForeignBaseline(WithoutArms):
    """An H100's, in the folder and under the name of an H200's."""

    @classmethod
    def ask(cls, pair: Fp8Pair | None) -> Outcome:
        from pytest_fp8.baselines.record import Baseline, StoredSession
        from pytest_fp8.baselines.store import Folder, read_baseline, write_baseline
        from pytest_fp8.errors import BaselineError

        case, digest = "1b-torchao-tensorwise", "0" * 16
        copied = StoredSession("2026-01-01", "", None, "a copy", {"name": "H100"}, {}, "0" * 12, {"fp8_share": [0.8]})
        with tempfile.TemporaryDirectory() as name:
            written = write_baseline(Path(name), Baseline(case, digest, "h100", (copied,)))
            target = Path(name, "h200", written.name)
            target.parent.mkdir()
            written.rename(target)
            try:
                read_baseline(Folder(Path(name)), "h200", case, digest)
            except BaselineError as error:
                return Outcome.of(cls, error)
        return Outcome(cls, "PASS", "the file was compared with")


@control("all-skipped", R.NOTHING_RAN, "every test skipped on a declared GPU", question="session")
class AllSkipped(WithoutArms):
    """``pytest --fp8-gpu=h200`` where no GPU is visible, in a pytest session of its own."""

    @classmethod
    def ask(cls, pair: Fp8Pair | None) -> Outcome:
        with tempfile.TemporaryDirectory() as name:
            Path(name, "test_gate.py").write_text(_SUITE)
            Path(name, "pytest.ini").write_text("[pytest]\n")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fp8-gpu=h200", name]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True, timeout=120, check=False)
        told = done.stdout + done.stderr
        code = cls.code if cls.code and cls.code in told else None
        return Outcome(cls, "FAIL" if done.returncode else "PASS", told, code)


_SUITE = """
import pytest
from pytest_fp8 import Case

@pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
def test_layers(fp8_pair):
    fp8_pair.assert_layers()
"""
