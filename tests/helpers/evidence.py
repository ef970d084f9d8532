"""Evidence written by hand: a healthy arm's, and changes to it; and two arms that a test answers for."""

from __future__ import annotations

import struct
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace

from pytest_fp8 import Case, Verdict
from pytest_fp8.codes import Code
from pytest_fp8.plan import TwoArms
from pytest_fp8.questions.checkpoints.evidence import Apart, Loaded, Resumed, Saved, Transfer
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.ledger.evidence import (
    ArmLedger,
    Entered,
    ModuleCalls,
    OptimizerNote,
    OwnedProduct,
    TensorNote,
    Updates,
    Weight,
)
from pytest_fp8.questions.loss.evidence import Curve
from pytest_fp8.recipes import RECOMPUTE, ROLES, Reason, Stays

CASE = Case("1b", "transformer_engine", "delayed")
HEAD = Reason(Stays.HEAD, "output projections stay in high precision")
SIZES = {"q": (64, 64), "up": (64, 256), "lm_head": (64, 512)}


def layers_evidence(bf16=(), kernel="fp8_kernel_1x1", case=CASE, again=(), **changes):
    """The evidence of a healthy arm, but for the ``(layer, role)`` pairs in ``bf16``, in the recorded step and in the
    profiled one, and for ``changes``. ``again``: the layers that are recomputed."""

    def product(call, role):
        on = call.fp8 and (call.name, role) not in bf16
        kind, ran_by = (FP8, kernel) if on else ("bfloat16", "bf16_kernel_1x1")
        return Product(*call.expected(role, RECOMPUTE), kind, "mm", ran_by)

    calls = []
    for name, (inputs, outputs) in SIZES.items():
        owed = [*ROLES, *([RECOMPUTE] if name in again else [])]
        call = LayerCall(name, inputs, outputs, 48, owed, fp8=name != "lm_head")
        calls.append(replace(call, ran={role: product(call, role) for role in owed}))
    ran = [product for call in calls for product in call.ran.values()]
    evidence = LayersEvidence(
        originals=SIZES,
        converted=["q", "up"],
        skipped={"lm_head": HEAD},
        live_fp8=["q", "up"],
        calls=calls,
        recipes={name: {"recipe": case.recipe, **case.full_options} for name in ("q", "up")},
        products=ran,
        families={FP8: ["fp8_kernel"], "bfloat16": ["bf16_kernel"]},
    )
    return replace(evidence, **changes)


WEIGHT = Weight(shape=[64, 64], dtype="bfloat16", digest="1", trained=True)


def sketch(*numbers):
    """Numbers as a sketch crosses the pipe."""
    return b64encode(struct.pack(f"{len(numbers)}f", *numbers)).decode()


TRAINED = ("lm_head.weight", "q.weight", "up.weight")
UPDATES = Updates(3, 0.25, dict.fromkeys(TRAINED, sketch(1.0, -2.0, 2.0)))


def arm_ledger(**changes):
    """The ledger of a healthy arm with two converted layers, a norm between them and a head."""
    names = {"q": (48, 64), "norm": (48, 64), "up": (48, 64), "lm_head": (48, 256)}
    rows = [ModuleCalls(name, "forward", list(size), "bfloat16", True, 1) for name, size in names.items()]
    head = Product("forward", 256, (48, 512), "bfloat16", "mm")
    given = TensorNote([48, 64], "bfloat16", "abc")
    healthy = ArmLedger(
        batch=[given],
        entered=[Entered("", "forward", True, True, [given])],
        calls=[ModuleCalls("", "forward", [48, 64], "bfloat16", True, 1, outermost=True), *rows],
        classes=dict.fromkeys(["", *names], "torch.nn.modules.module.Module"),
        products=[OwnedProduct("lm_head", head)],
        operators={"norm": {"mul bfloat16": 2, "rsqrt float32": 1}, "": {"nll_loss_forward float32": 1}},
        waits={},
        backward=1,
        stepped=1,
        gradients=["lm_head.weight", "q.weight", "up.weight"],
        norm_kept=1.0,
        loss=5.0,
        loss_dtype="float32",
        random="r",
        draws=(),
        before=dict.fromkeys(["q.weight", "up.weight", "lm_head.weight"], WEIGHT),
        after=dict.fromkeys(["q.weight", "up.weight", "lm_head.weight"], WEIGHT),
        optimizer=OptimizerNote("AdamW", [{"lr": "0.001"}], {"q.weight": 0, "up.weight": 0, "lm_head.weight": 0}),
        updates=UPDATES,
        switches={"torch.backends.cuda.matmul.allow_tf32": "False", "autocast on cuda": "off"},
        switches_after={"torch.backends.cuda.matmul.allow_tf32": "False"},
        fp8_layers=["q", "up"],
        linears=["q", "up", "lm_head"],
        routed=(),
        watched=True,
    )
    return replace(healthy, **changes)


def curves(offset=0.0, seeds=3, steps=20, wobble=0.0005):
    """Curves of several seeds that fall from 5 nats; ``wobble`` times the seed is added to each."""
    return {
        s: Curve(s, [5 - 0.1 * t + offset + wobble * (s + 1) for t in range(steps)], [1.0] * steps)
        for s in range(seeds)
    }


def verdict_of(decision, verdict, *words):
    """Assert the verdict, and a code or what the message names; what is no PASS must say what to do next."""
    assert decision.verdict is verdict, decision.message
    for word in words:
        if isinstance(word, Code):
            assert decision.code is word, decision.message
        else:
            assert word in decision.message
    if verdict is not Verdict.PASS:
        assert "next:" in decision.message


def transfer(saved_changes=None, loaded_changes=None, **changes):
    """A healthy checkpoint through DCP, but for changes of what was saved, of what was loaded, and of the rest."""
    both = {"digests": {"w": 1, "v": 2}, "optimizer_digests": {"o": 5}}
    healthy = {
        "arms": ("fp8", "bf16"),
        "store": "dcp",
        "saved": Saved(**{**both, "on_disk": {"BF16": 2}, **(saved_changes or {})}),
        "loaded": Loaded(**{**both, **(loaded_changes or {})}),
        "logit_distance": 0.01,
        "start": Apart(0.025, 1024, 0.0),
        "with_optimizer": True,
        "source": trained([2.0, 1.9]),
        "resumed": trained([2.0, 1.9]),
    }
    return Transfer(**{**healthy, **changes})


def trained(losses, data=1, inputs=(), **kept):
    """Steps after a checkpoint; ``kept``: what an arm keeps besides afterwards."""
    return Resumed(losses, data, list(inputs), kept)


class StandIn(TwoArms):
    """``reference`` and ``fp8`` have a ``request`` as arms do, and ``facts`` where something reads them."""

    def __init__(self, case, reference, fp8=None):
        pool = SimpleNamespace(
            cache={},
            gpu=None,
            deaths={},
            is_alive=lambda arm: True,
            live=lambda arm: arm,
            takes_turns=lambda arm: False,
            tight=lambda *arms, recorded=False: True,
        )
        arms = [
            SimpleNamespace(
                key=name,
                pid=name,
                spec=SimpleNamespace(device="cpu"),
                request=lambda operation, arm=arm, **how: arm.request(operation, **how),
                facts=getattr(arm, "facts", {}),
            )
            for name, arm in (("reference", reference), ("fp8", fp8))
        ]
        super().__init__(case, pool, *arms)
