"""The catalogue of controls, all of them.

``cd suites && python -m controls.catalogue`` writes its table into docs/controls.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from controls import arms, checkpoints, conversion, products, ranks, scripts, speed  # noqa: F401
from controls.control import CONSTRUCTED, CONTROLS, GPU, Control

CATALOGUE: tuple[type[Control], ...] = tuple(sorted(CONTROLS.values(), key=lambda control: str(control.code)))
EACH_COMMIT = """
env-unread model-unprepared odd-layer-stops second-name recipe-dropped head-converted hook-dropped weight-scaled
weights-in-bf16 bias-dropped layer-bypassed forward-only wgrad-bf16 half-in-bf16 recompute-bf16 eval-off
other-data half-batch-step gradient-through-e4m3 tf32-one-arm no-autocast reference-waits fp8-arm-in-eval
head-float32 recomputes-alone recomputes-otherwise epsilon-of-an-own-norm seeds-again other-rate gradients-rounded
teacher-stands-still e5m2-for-e4m3 dgrad-x2 wgrad-rows-permuted
gradient-underflow input-of-the-step-before bias-gradient-mean gradients-x4 scaled-gradient fp8-off bf16-by-hooks
off-after-ten-steps nan-step-40 one-weight-frozen batches-carry-on stored-in-fp8 optimizer-lost tie-broken
schedule-restarts buffers-lost save-leaves-eval script-off script-batch script-hangs foreign-baseline all-skipped
"""
"""Of those that need no GPU: one of each kind. The others run each night."""
GITHUB = "https://github.com"
ACCELERATE = f"{GITHUB}/huggingface/accelerate/blob/main/src/accelerate"
TORCHAO = f"{GITHUB}/pytorch/ao/blob/main/torchao/float8"
SEEN = {
    "env-unread": "report: full fine-tuning of 8B at 0.82x, environment variables that nobody read",
    "trainer-bf16": f"[transformers, TrainingArguments]({GITHUB}/huggingface/transformers/blob/main/src/transformers"
    "/training_args.py)",
    "model-unprepared": f"[Accelerate, Accelerator.prepare]({ACCELERATE}/accelerator.py)",
    "odd-layer-stops": f"[Accelerate, convert_model]({ACCELERATE}/utils/transformer_engine.py)",
    "base-unfrozen": f"[Accelerate, convert_model]({ACCELERATE}/utils/transformer_engine.py)",
    "tie-broken": f"[Accelerate, convert_model copies the weight]({ACCELERATE}/utils/transformer_engine.py)",
    "recipe-dropped": f"[Accelerate's DeepSpeed path ignores the recipe handler]({ACCELERATE}/accelerator.py)",
    "wrong-library": f"[Accelerate's choice of FP8 backend]({ACCELERATE}/accelerator.py)",
    "optimizer-too-early": f"[Accelerate, AORecipeKwargs]({ACCELERATE}/utils/dataclasses.py)",
    "eval-off": f"[Accelerate, use_autocast_during_eval]({ACCELERATE}/utils/dataclasses.py)",
    "second-name": f"[torchao, swap_linear_layers]({TORCHAO}/float8_linear_utils.py)",
    "head-converted": f"[torchao, module_filter_fn]({TORCHAO}/float8_linear_utils.py)",
    "adapters-converted": f"[torchao, module_filter_fn]({TORCHAO}/float8_linear_utils.py)",
    "hook-dropped": f"[torchao, Float8Linear.from_float]({TORCHAO}/float8_linear.py)",
    "wgrad-bf16": f"[torchao, rowwise_with_gw_hp]({TORCHAO}/config.py)",
    "no-compile": f"[torchao's README of float8]({TORCHAO}/README.md)",
    "forward-only": f"[Unsloth, load_in_fp8]({GITHUB}/unslothai/unsloth/blob/main/unsloth/kernels/fp8.py)",
    "recompute-bf16": f"[Megatron-LM 7538]({GITHUB}/NVIDIA/Megatron-LM/pull/7538)",
    "recompute-outside": "[torch.utils.checkpoint under te.autocast]"
    f"({GITHUB}/pytorch/pytorch/blob/main/torch/utils/checkpoint.py)",
    "nan-step-40": f"[torchtitan 1056]({GITHUB}/pytorch/torchtitan/issues/1056)",
    "loss-drift": f"[Megatron-LM 1152]({GITHUB}/NVIDIA/Megatron-LM/issues/1152)",
    "rate-too-small": "[8B at rate 5e-6](measurements.md#eight-billion-parameters-do-not-learn-in-a-minute)",
    "slow-attention": "[two cuDNN libraries](measurements.md#two-cudnn-libraries)",
    "memory-up": "report: adapters on 8B with Unsloth, +66 % of memory",
}
"""Control -> where it was seen: a link, or the subject of a user's report."""
for _control in CATALOGUE:
    _control.nightly = _control.runs() != GPU and _control.id not in EACH_COMMIT.split()
    _control.source = SEEN.get(_control.id, CONSTRUCTED)
PAGE = Path(__file__).parents[2] / "docs/controls.md"
BLOCK = re.compile(r"(?<=<!-- catalogue -->\n).*?(?=<!-- end -->)", re.S)


def __getattr__(id: str) -> type[Control]:
    """A control by its id: an arm's process finds its class so (:meth:`Control.path`)."""
    try:
        return CONTROLS[id]
    except KeyError:
        raise AttributeError(f"no control has the id {id!r}") from None


def page() -> str:
    """What docs/controls.md holds between its marks: how many there are, and a row for each."""
    seen = sum(control.id in SEEN for control in CATALOGUE)
    gpu = [control for control in CATALOGUE if control.runs() == GPU]
    commit = sum(not control.nightly for control in CATALOGUE if control not in gpu)
    several = ", ".join(f"`{control.id}`" for control in gpu if control.case.gpus > 1)
    lines = [
        f"There are {len(CATALOGUE)}. {seen} were seen: in a library's source or tracker, in a user's report, or in "
        "this project's own runs ([measurements](measurements.md)). The others are *constructed*: faults that the gate "
        "must see and of which no report is known.",
        "",
        f"{len(CATALOGUE) - len(gpu)} run on any machine, on emulated FP8 or without an arm: `tox -e suite` runs "
        f"{commit} of them, one of each kind, and `tox -e nightly` the others. {len(gpu)} need a GPU, {several} two.",
        "",
        "| control | what is broken | found by | as | seen |",
        "|---|---|---|---|---|",
    ]
    for control in CATALOGUE:
        found = " or ".join(control.verdicts).replace("_", " ")
        where = f"{control.question}{' (GPU)' * (control in gpu)}"
        lines.append(f"| {control.id} | {control.title} | {where} | {found}: `{control.code}` | {control.source} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # Run as a program, this module is another one than the arms import; the table is the same.
    PAGE.write_text(BLOCK.sub(lambda _: page(), PAGE.read_text()))
