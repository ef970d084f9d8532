"""What an arm of three layers answers to each request of the protocol: evidence written by hand."""

from __future__ import annotations

from base64 import b64encode
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from helpers.evidence import arm_ledger
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, Loaded, Saved
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.loss.evidence import Curve, Moved
from pytest_fp8.questions.numerics.evidence import ArmNumerics, Gradients, ProductCheck
from pytest_fp8.recipes import FPROP, RECOMPUTE, ROLES, Reason, Stays, recipe_facts

SIZES = {"layers.0.q_proj": (256, 256), "layers.0.up_proj": (256, 768), "lm_head": (256, 1024)}
ROWS = 512
STATE = {"optimizer/w/step": 3}


class FakeAnswers:
    """The operations of an arm, by name. What a test may change of them is in its ``World``."""

    world: Any
    spec: Any
    noise: np.random.Generator

    @property
    def is_fp8(self) -> bool:
        return self.spec.case.backend != "bf16"

    def layers(self) -> dict[str, Any]:
        case = self.spec.case
        roles = self.world.executed_roles or recipe_facts(case.backend, case.recipe).roles
        owed = [*ROLES, *([RECOMPUTE] if case.activation_checkpointing else [])]
        stays = ("lm_head", *(name for name in SIZES for left in self.spec.leave if fnmatchcase(name, left)))
        calls = [LayerCall(n, i, o, ROWS, owed, fp8=self.is_fp8 and n not in stays) for n, (i, o) in SIZES.items()]
        products = []
        for call in calls:
            for role in call.owed:
                phase, inner, outer = call.expected(role, RECOMPUTE)
                on = call.fp8 and (FPROP if role == RECOMPUTE else role) in roles
                kernel = "nvjet_sm90_qqtst_64x8_1" if on else "nvjet_sm90_tst_64x8_1"
                time = (0.03 if on else 0.06) * (self.world.busy or 0.0)
                kind = FP8 if on else "bfloat16"
                products.append(Product(phase, inner, outer, kind, "mm", kernel, milliseconds=time))
        converted = [c.name for c in calls if c.fp8]
        evidence = LayersEvidence(
            originals=SIZES,
            converted=converted,
            skipped={name: Reason(Stays.HEAD, "stays") for name in SIZES if name not in converted},
            live_fp8=converted,
            calls=calls,
            recipes={name: {"recipe": case.recipe, **case.full_options, **self.world.recipe} for name in converted},
            products=products,
            families={FP8: ["nvjet_sm90_qqtst"], "bfloat16": ["nvjet_sm90_tst"]},
            attention={"sdpa": [self.world.attention if self.is_fp8 else "cudnn_flash"]},
            milliseconds=self._milliseconds(products),
            kinds=dict.fromkeys(SIZES, "torch.nn.modules.linear.Linear"),
            switches={"asked": "", "accelerate": ""},
        )
        return {**to_plain(evidence), **self._several_steps()}

    def numerics(self, moved: bool) -> dict[str, Any]:
        sound = {"values": 16384, "power": 1.0, "gain": 1.0, "sqnr": 28.0, "own_gain": 1.0, "own_sqnr": 28.0}
        rest = {"gain_error": 0.0, "lost": 0.0, "underflow": 0.0}
        checks = [ProductCheck(layer=name, role=role, **sound, **rest) for name in SIZES for role in ROLES]
        gradients, others = self._gradients(self.is_fp8), self._gradients(True) if moved else None
        return to_plain(ArmNumerics(checks, gradients, others, checks, checks, checks))

    def _gradients(self, changed: bool) -> Gradients:
        off = 0.05 if changed else 0.0
        numbers = np.cos(np.arange(1024)) + off * np.sin(np.arange(1024) * 7)
        text = b64encode(numbers.astype(np.float32).tobytes()).decode()
        return Gradients(dict.fromkeys(SIZES, text), [], 5.0, 0)

    def busy(self, steps: int) -> dict[str, Any]:
        return self._several_steps(steps)

    def _several_steps(self, steps: int = 5) -> dict[str, Any]:
        if not self.world.kernels_alone or self.world.busy is None:
            return {"step_ms": [], "busy_ms": [], "compute_ms": [], "collectives": []}
        works = self.world.busy / ((self.world.kernels or self.world.speedup) if self.is_fp8 else 1.0)
        busy = [float(works * np.exp(self.noise.normal(0, 0.002))) for _ in range(steps)]
        step = 110.0 / (min(1.0, self.world.speedup) if self.is_fp8 else 1.0)
        return {"step_ms": [step] * steps, "busy_ms": busy, "compute_ms": busy, "collectives": []}

    def ledger(self) -> dict[str, Any]:
        return to_plain(arm_ledger())  # type: ignore[no-any-return]

    def _milliseconds(self, products: list[Product]) -> dict[str, float]:
        if self.world.busy is None:
            return {}
        fp8 = sum(product.milliseconds for product in products if product.kind == FP8)
        others = sum(product.milliseconds for product in products) - fp8
        classes = {"fp8 products": fp8, "other products": others, "attention": 0.1 * self.world.busy}
        return {**classes, "rest": self.world.busy - sum(classes.values()), "busy": self.world.busy}

    def curve(self, seed: int, steps: int, jitter: bool = False, first_step: int = 0, **_: Any) -> dict[str, Any]:
        # Each seed has weights of its own.
        offset = 0.001 * (seed + 1) * (self.is_fp8 + 0.5 * jitter) + 1e-5 * seed
        losses = [5.0 / (1 + step / 10) + offset for step in range(first_step, first_step + steps)]
        if self.is_fp8 and self.world.nan_at is not None:
            losses = [x if step < self.world.nan_at else float("nan") for step, x in enumerate(losses)]
        movement = dict.fromkeys(SIZES, Moved(65536, moved=0.9, reached=1.0))
        return to_plain(Curve(seed, losses, [1.0] * steps, movement=movement))

    def resume(self, seed: int, first_step: int, steps: int) -> dict[str, Any]:
        losses = self.curve(seed, steps, first_step=first_step)["losses"]
        return {**to_plain(NOT_RESUMED), "losses": losses}

    def memory(self) -> dict[str, Any]:
        peak = (self.world.fp8_memory if self.is_fp8 else 100) * 2**30
        phases = dict.fromkeys(("forward", "backward", "optimizer"), peak)
        return {"resident": peak // 2, "phases": phases, "peak_allocated": peak, "peak_reserved": peak, "kinds": {}}

    def alone(self, layers: list[Any], recipes: list[str]) -> dict[str, Any]:
        """Each layer by itself has an input of its own."""

        def times(name: str, outputs: int) -> dict[str, float]:
            usual = (1.0, 0.1) if name == "bf16" else (0.6, 0.2)
            return dict(zip(("products", "rest"), self.world.alone.get((name, outputs), usual), strict=True))

        def group(index: int, size: int) -> dict[str, Any]:
            told = {name: {"all": times(name, size), "without": [times("bf16", size)]} for name in recipes}
            return {"members": [index], "none": times("bf16", size), "recipes": told}

        return {"groups": [group(index, size) for index, (_, _, size, _, _) in enumerate(layers)]}

    def park(self) -> None: ...

    def restart(self, seed: int, jitter: bool = False) -> None: ...

    def save(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return to_plain(Saved(on_disk={"BF16": 1}, digests={"w": 1}, optimizer_digests=STATE if optimizer else {}))

    def load(self, folder: str, store: str, optimizer: bool, seed: int) -> dict[str, Any]:
        return to_plain(Loaded(digests={"w": 1}, optimizer_digests=STATE if optimizer else {}))

    def logits(self, seed: int) -> bytes:
        return bytes(4) + (np.ones(8, dtype=np.float32) * (1.01 if self.is_fp8 else 1.0)).tobytes()
