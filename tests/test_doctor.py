"""``pytest-fp8 doctor``: what it says of a machine, with a GPU of our own making and on this one."""

from __future__ import annotations

import importlib.metadata
import json
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
    """``doctor(gpu, ...)``: the exit code, the findings by topic and the text on such a machine."""

    def asked(gpu=H200, conditions=QUIET, answer=FP8_PRODUCT, versions=VERSIONS, arguments=()):
        monkeypatch.setattr(gpus, "detect", lambda: (gpu, "" if gpu else "no NVIDIA GPU"))
        monkeypatch.setattr(gpus, "conditions", lambda *_: conditions)
        monkeypatch.setattr(
            its, "library_versions", lambda packages: {p: versions[p] for p in packages if p in versions}
        )
        monkeypatch.setattr(its, "tried", lambda name, recipe, emulated: answer)
        code = main(["doctor", "--json", *arguments])
        told = json.loads(capsys.readouterr().out)
        assert told["ok"] == (code == 0)
        topics: dict[str, list[dict]] = {}
        for finding in told["findings"]:
            topics.setdefault(finding["topic"], []).append(finding)
        return code, topics

    return asked


def test_what_the_driver_does_not_tell_is_no_quiet_gpu(doctor):
    _, topics = doctor(conditions=Conditions(unknown=(gpus.CLOCKS, gpus.NEIGHBOURS)))
    assert [topics[topic][0]["state"] for topic in ("clocks", "neighbours")] == ["note"] * 2


def text(findings):
    return "\n".join(finding["text"] for finding in findings)


def problems(topics):
    return [finding["text"] for findings in topics.values() for finding in findings if finding["state"] == "problem"]


def test_a_machine_with_a_hopper_gpu_is_described(doctor):
    _, topics = doctor()
    assert {"machine", "GPU", "clocks", "neighbours", "libraries", "cuDNN", "recipes", "products"} == {*topics}
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


def test_a_version_that_nobody_tested_is_a_note(doctor):
    code, topics = doctor(gpu=None, versions={**VERSIONS, "torch": "2.12.1+cu130"})
    assert "torch 2.12.1+cu130: expected to work; tested: 2.11.0, 2.13.0, 2.14.1" in text(topics["libraries"])
    assert problems(topics) == []
    assert code == 0


def test_no_process_is_started_where_none_is_wanted(doctor):
    assert "products" not in doctor(arguments=["--no-products"])[1]


def test_a_system_cudnn_beside_torchs_own_is_told(doctor, monkeypatch, tmp_path):
    (tmp_path / "libcudnn.so.9.14.0").touch()
    monkeypatch.setattr(its, "CUDNN_FOLDERS", (str(tmp_path),))
    told = doctor(versions={**VERSIONS, "nvidia-cudnn-cu13": "9.19.0.56"})[1]["cuDNN"]
    assert "nvidia-cudnn-cu13 9.19.0.56" in told[0]["text"]
    assert "libcudnn.so.9.14.0" in told[1]["text"]
    assert "CUDNN_HOME" in told[1]["next_step"]


def test_the_tested_versions_are_those_of_the_page():
    page = (ROOT / "docs/compatibility.md").read_text()
    for package, versions in its.TESTED.items():
        row = next(line for line in page.splitlines() if line.lower().replace(" ", "-").startswith(f"|-{package}-|"))
        assert all(version in row for version in versions), package


def test_the_text_is_narrow_and_says_what_runs_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(gpus, "detect", lambda: (None, "no NVIDIA GPU"))
    main(["doctor", "--no-products"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "emulated=True run on the CPU" in " ".join(" ".join(lines).split())


def test_of_a_missing_library_one_command_is_told_in_one_piece(monkeypatch, capsys):
    there = importlib.metadata.version

    def version(package):
        if package in ("transformer-engine", "unsloth"):
            raise importlib.metadata.PackageNotFoundError(package)
        return there(package)

    monkeypatch.setattr(gpus, "detect", lambda: (None, "no NVIDIA GPU"))
    monkeypatch.setattr(importlib.metadata, "version", version)
    here = {package: found for package, found in VERSIONS.items() if package != "transformer-engine"}
    monkeypatch.setattr(its, "library_versions", lambda packages: here)
    main(["doctor", "--no-products"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [line.removeprefix("next: ") for line in lines if "pip install" in line]
    assert all(f"next: {command}" in lines for command in commands), "a command has a line of its own"
    [command] = [command for command in commands if "transformer" in command]
    assert shlex.split(command) == ["pip", "install", "transformer-engine[pytorch]>=2.9"]
    assert installed("transformer-engine", "2.9")[1] == f"transformer-engine is not installed: {command}"
    assert not [line for line in lines if line.endswith(("-", "pip", "install"))]


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
