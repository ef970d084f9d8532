"""What the questions say of a model that Accelerate prepared: options it drops, layers it skips, ties it breaks."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from helpers.evidence import layers_evidence
from pytest_fp8 import Case, Verdict
from pytest_fp8.codes import L
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.recipes import Reason, Stays

DEFAULT = Case("1b", "accelerate_te", "delayed")


def test_a_default_that_accelerate_drops_is_named_with_its_reason():
    seen = {"recipe": "delayed", **DEFAULT.full_options, "amax_compute_algo": "max"}
    decision = check_layers(DEFAULT, layers_evidence(case=DEFAULT, recipes={"q": seen, "up": seen}))
    assert decision.verdict is Verdict.FAIL
    assert "amax_compute_algo=most_recent" in decision.message
    assert "to_kwargs()" in decision.message
    asked = replace(DEFAULT, options={"amax_compute_algo": "max"})
    assert check_layers(asked, layers_evidence(case=asked)).verdict is Verdict.PASS


def test_a_conversion_that_stops_is_named_with_the_layer_it_stopped_at():
    sizes = {"mlp.gate": (64, 64), "mlp.router": (64, 10), "mlp.up": (64, 256)}
    evidence = layers_evidence(
        originals=sizes,
        converted=["mlp.gate", "mlp.up"],
        skipped={"mlp.router": Reason(Stays.SIZE, "out_features=10 is not a multiple of 16")},
        live_fp8=["mlp.gate"],
    )
    decision = check_layers(DEFAULT, evidence)
    assert decision.verdict is Verdict.FAIL
    assert "left for their sizes: mlp.router (size: out_features=10" in decision.seen
    assert "not FP8: mlp.up" in decision.message


def test_converted_adapters_fail():
    names = {"q": (32, 32), "q.lora_A": (32, 16)}
    evidence = layers_evidence(
        originals=names,
        converted=["q"],
        skipped={"q.lora_A": Reason(Stays.ADAPTER, "LoRA")},
        live_fp8=list(names),
    )
    decision = check_layers(DEFAULT, evidence)
    assert decision.code is L.LEFT_AND_CONVERTED
    assert "q.lora_A left alone (adapter: LoRA)" in decision.expected


def test_an_update_does_not_ask_what_is_known_to_fail():
    """`-m hugging_face` with an update must not refuse 1b-accelerate.te for the known defect of its head."""
    tree = ast.parse((Path(__file__).parent.parent / "suites" / "test_defects.py").read_text())
    for node in tree.body:
        functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        pairs = [f for f in functions if isinstance(f, ast.FunctionDef) and "fp8_pair" in {a.arg for a in f.args.args}]
        if pairs and isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert any("healthy_alone" in ast.unparse(d) for d in node.decorator_list), node.name
