"""Which hooks a control's arm gets. Imported in every arm, so the breakages themselves are imported only when asked."""

from __future__ import annotations

from importlib import import_module

from pytest_fp8.worker.fault_points import FaultPoints

_HOMES = {
    "env-unread": ("conversion", "NothingReadsTheEnvironment"),
    "trainer-bf16": ("conversion", "TrainerBf16Wins"),
    "odd-layer-stops": ("conversion", "StopsAtTheFirstOddLayer"),
    "forward-only": ("execution", "ForwardOnly"),
    "wgrad-bf16": ("execution", "WgradInHighPrecision"),
    "no-compile": ("training", "NotCompiled"),
    "recompute-bf16": ("execution", "RecomputeInBf16"),
    "recompute-outside": ("execution", "RecomputeOutsideAutocast"),
    "recipe-dropped": ("conversion", "RecipeDropped"),
    "eval-off": ("execution", "EvalSwitchesOff"),
    "nan-step-40": ("training", "NanAtStep40"),
    "loss-drift": ("training", "SmallGradientsLost"),
    "scale-off-by-two": ("execution", "OneScaleOffByTwo"),
    "amax-frozen": ("execution", "AmaxHistoryFrozen"),
    "other-data": ("training", "OtherData"),
    "fp8-off": ("execution", "Fp8Off"),
    "fp8-slower": ("training", "ThreePerCentSlower"),
    "both-slower": ("training", "TenPerCentSlower"),
    "slow-attention": ("training", "SlowAttention"),
    "stored-in-fp8": ("checkpoints", "StoredInFp8"),
    "prefixed-keys": ("checkpoints", "LoadedIntoNothing"),
    "optimizer-lost": ("checkpoints", "OptimizerNotLoaded"),
    "memory-up": ("training", "MemoryUpByTwoThirds"),
    "head-converted": ("conversion", "HeadConverted"),
    "adapters-converted": ("conversion", "AdaptersConverted"),
    "wrong-library": ("conversion", "OtherLibraryChosen"),
    "nan-one-run-in-four": ("training", "NanInOneRun"),
    "optimizer-too-early": ("roads", "OptimizerMadeBefore"),
    "model-unprepared": ("roads", "ModelNotPrepared"),
    "tie-broken": ("roads", "TieBroken"),
    "base-unfrozen": ("roads", "BaseUnfrozen"),
    "hook-dropped": ("conversion", "HookDropped"),
}
ARMS = tuple(_HOMES)
"""The controls that break an arm; the others break a baseline or a run."""


def fault_points_of(control: str | None) -> FaultPoints:
    """The hooks of an arm; raises ``KeyError`` for a control that breaks no arm."""
    if control is None:
        return FaultPoints()
    module, name = _HOMES[control]
    hooks: FaultPoints = getattr(import_module(f"pytest_fp8.controls.{module}"), name)()
    return hooks
