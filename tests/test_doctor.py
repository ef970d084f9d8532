"""``pytest-fp8 doctor``: what it says of a machine, with a GPU of our own making and on this one."""

from __future__ import annotations

import importlib.metadata
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200
from pytest_fp8 import doctor as its
from pytest_fp8 import gpu as gpus
from pytest_fp8.cli import main
from pytest_fp8.gpu import Conditions
from pytest_fp8.libraries import installed, wanted

ROOT = Path(__file__).parent.parent
FP8_PRODUCT = {"off": 0.037, "kernel": "sm90_xmma_gemm_e4m3", "cudnn": 91900}
QUIET = Conditions(1980)
VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "torchao": "0.18.0", "transformer-engine": "2.20.2"}


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``doctor(gpu, ...)``: the exit code and the findings by topic, as (state, text), on such a machine."""

    def asked(gpu=H200, conditions=QUIET, answer=FP8_PRODUCT, versions=VERSIONS):
        monkeypatch.setattr(gpus, "detect", lambda: (gpu, "" if gpu else "no NVIDIA GPU"))
        monkeypatch.setattr(gpus, "conditions", lambda *_: conditions)
        monkeypatch.setattr(
            its, "library_versions", lambda packages: {p: versions[p] for p in packages if p in versions}
        )
        monkeypatch.setattr(its, "tried", lambda name, recipe, emulated: answer)
        topics: dict[str, list[tuple[str, str]]] = {}
        for finding in its.findings():
            topics.setdefault(finding.topic, []).append((finding.state, finding.text))
        code = main(["doctor"])
        assert ("no problems" in capsys.readouterr().out) is (code == 0)
        return code, topics

    return asked


def test_what_the_driver_does_not_tell_is_no_quiet_gpu(doctor):
    _, topics = doctor(conditions=Conditions(unknown=(gpus.CLOCKS, gpus.NEIGHBOURS)))
    assert [topics[topic][0][0] for topic in ("clocks", "neighbours")] == ["note"] * 2


def text(findings):
    return "\n".join(said for _, said in findings)


def problems(topics):
    return [said for findings in topics.values() for state, said in findings if state == "problem"]


def test_a_machine_with_a_hopper_gpu_is_described(doctor):
    _, topics = doctor()
    assert {"machine", "GPU", "clocks", "neighbours", "libraries", "recipes", "products"} == {*topics}
    assert "--fp8-gpu=h200" in text(topics["GPU"])
    assert "torchao: tensorwise, rowwise, rowwise_with_gw_hp" in text(topics["recipes"])


def test_recipes_follow_the_capability(doctor):
    gpu = replace(H200, name="NVIDIA L40S", capability=(8, 9))
    assert "torchao: tensorwise; rowwise needs compute capability 9.0 or newer" in text(doctor(gpu)[1]["recipes"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpu": replace(H200, name="NVIDIA A100", capability=(8, 0))}, "no FP8 tensor cores"),
        ({"conditions": Conditions(800, ("hardware thermal",))}, "throttled: hardware thermal"),
        ({"conditions": Conditions(1980, (), (77,))}, "1 other process(es) hold memory"),
        ({"versions": {**VERSIONS, "torchao": "0.9.0"}}, "torchao 0.9.0 is older than this plugin takes (>=0.14)"),
        ({"versions": {"torch": "2.11.0", "transformers": "5.17.0"}}, "nothing here computes in FP8"),
        ({"versions": {"torchao": "0.18.0", "transformers": "5.17.0"}}, "torch is not installed"),
        (
            {"gpu": None, "answer": {"error": "exited with -11: nothing was said"}},
            "tensorwise: exited with -11",
        ),
        ({"gpu": None, "answer": {**FP8_PRODUCT, "off": 0.002}}, "it did not run in FP8"),
        ({"gpu": None, "answer": {**FP8_PRODUCT, "off": 1.3}}, "wrong, even for FP8"),
    ],
)
def test_what_is_in_the_way_is_a_problem_and_exit_code_1(doctor, wrong, says):
    code, topics = doctor(**wrong)
    assert code == 1
    assert any(says in problem for problem in problems(topics)), problems(topics)


def test_without_a_gpu_it_says_what_runs_there(doctor):
    code, topics = doctor(gpu=None)
    assert "emulated=True run on the CPU" in text(topics["GPU"])
    assert (code, problems(topics)) == (0, [])


def test_of_a_missing_library_the_command_has_a_line_of_its_own(monkeypatch):
    there = importlib.metadata.version

    def version(package):
        if package == "transformer-engine":
            raise importlib.metadata.PackageNotFoundError(package)
        return there(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    command = f"pip install {wanted('transformer-engine')}"
    lines = [line.strip() for line in its.lines_of([*its.library_findings(), *its.recipe_findings(None)])]
    assert lines.count(f"next: {command}") == 1
    assert shlex.split(command)[-1] == "transformer-engine[pytorch]>=2.9"
    assert installed("transformer-engine", "2.9")[1] == f"transformer-engine is not installed: {command}"


def test_the_command_of_a_library_is_what_the_extra_of_it_brings():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, package in (("te", "transformer-engine"), ("torchao", "torchao"), ("unsloth", "unsloth")):
        assert shlex.split(wanted(package)) == extras[extra]
    assert wanted("no-such-package-at-all") == "no-such-package-at-all"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_product_is_really_computed_in_a_process_of_its_own():
    pytest.importorskip("torchao")
    answer = its.tried("torchao", "tensorwise", emulated=True)
    assert its.judged("torchao", "tensorwise", answer).state == "ok", answer


@pytest.mark.slow
@pytest.mark.nightly
def test_a_product_that_cannot_be_computed_is_an_error():
    assert "error" in its.tried("torchao", "no-such-recipe", emulated=True)
