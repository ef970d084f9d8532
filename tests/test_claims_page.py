"""The claims of this repository, and the page, the table and the JSON that the command makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.claims import CLAIMS
from benchmarks.claims.__main__ import main
from benchmarks.claims.judgement import HELD, NOT_MEASURED, NOT_REPRODUCED
from helpers.claims import baseline, speed
from pytest_fp8.baselines.store import write_baseline

ROOT = Path(__file__).parent.parent


def test_claims_have_ids_of_their_own_and_published_ones_an_address():
    assert len({one.id for one in CLAIMS}) == len(CLAIMS)
    assert all(one.source.url.startswith("https://") == (one.source.kind == "published") for one in CLAIMS)


def test_the_page_in_this_repository_is_what_the_command_prints_now(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/claims.md").read_text(), (
        "make it again: python -m benchmarks.claims --markdown > docs/claims.md"
    )


def test_the_table_and_the_json_hold_every_claim(tmp_path, capsys):
    write_baseline(tmp_path, baseline(speedup=speed(1.149), fp8_ms=[8.0] * 4, bf16_ms=[8.0 * 1.149] * 4))
    assert main(["--baselines", str(tmp_path), "--json"]) == 0
    found = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert found.keys() == {one.id for one in CLAIMS}
    assert found["torchao-454m-speed"]["verdict"] == NOT_REPRODUCED
    assert found["torchao-454m-speed"]["differs"]["GPU"] == "H200 instead of H100"
    assert found["torchao-454m-rate"]["verdict"] == HELD
    assert found["torchao-350m-speed"]["command"].startswith("pytest benchmarks/claims/test_measure.py")
    assert found["guide-1b-speed"]["command"].startswith("pytest suites -k")
    assert main(["--baselines", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "1.149x" in table
    assert "--fp8-gpu=h200" in table


def test_baselines_that_cannot_be_read_are_an_error(tmp_path, capsys):
    assert main(["--baselines", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_another_gpu_has_no_answers(tmp_path, capsys):
    write_baseline(tmp_path, baseline(speedup=speed(1.4)))
    main(["--baselines", str(tmp_path), "--gpu", "h100", "--json"])
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)} == {NOT_MEASURED}


def test_the_command_loads_no_torch():
    code = (
        "import sys; from benchmarks.claims.__main__ import main; main([]);"
        "print([name for name in ('torch', 'pytest', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
