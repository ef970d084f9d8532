"""The catalogue of controls: 32 ways in which FP8 training was broken, and the check and cause that must name each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_fp8.cases import Case

EMULATED, ANYWHERE, GPU = "emulated", "anywhere", "gpu"
USERS = "reported by users"


@dataclass(frozen=True)
class Control:
    """One broken arm, checkpoint, baseline or run."""

    id: str
    number: int
    title: str
    source: str
    """Where it happened, in public; or that users report it."""
    broken: str
    """How it is broken here."""
    question: str
    """The question that must find it: one of the five, ``baseline``, ``session`` or ``precision``."""
    cause: str
    """What the message must say, in these words."""
    case: Case | None = None
    """The pair it is run with; ``None`` where no arm is needed."""
    verdicts: tuple[str, ...] = ("FAIL",)
    """The verdicts that catch it."""
    breaks: tuple[str, ...] = ("fp8",)
    """The arms it breaks: ``fp8``, ``bf16``."""
    workload: str = ""
    """A model of :mod:`pytest_fp8.controls.models`, where it needs one of its own."""
    leaves_traces: bool = False
    """Whether it changes its arm's whole process (environment, a library's global state)."""
    needs: tuple[str, ...] = ()
    """Packages beyond the backend's own."""

    @property
    def runs(self) -> str:
        """``emulated`` (any machine, torchao's numerics), ``anywhere`` (no arm at all) or ``gpu``."""
        if self.case is None:
            return ANYWHERE
        return EMULATED if self.case.emulated else GPU


def micro(recipe: str = "tensorwise", **more: Any) -> Case:
    """The emulated case of a control: a model of 0.1 M parameters whose step takes milliseconds."""
    return Case(more.pop("model", "micro"), "torchao", recipe, emulated=True, **more)


ONE_B = Case("1b", "torchao", "tensorwise")
CLOSE = Case("1b", "torchao", "rowwise_with_gw_hp", tolerance=0.015)
"""The gate at half its usual tolerance: a loss of 3 % lies *at* the usual one, where neither verdict is right. Its
recipe is the one whose stored processes agree best (0.02 %); those of tensorwise, 1.1 % apart, cannot hold 1.5 %."""
TINY = Case("tiny", "torchao", "tensorwise", questions=("layers", "loss", "memory", "checkpoints"))


def tiny_te(recipe: str) -> Case:
    return Case("tiny", "transformer_engine", recipe, questions=("layers", "loss", "memory", "checkpoints"))


CATALOGUE: tuple[Control, ...] = (
    Control(
        "env-unread",
        1,
        "the environment asks for FP8, nothing was converted",
        USERS,
        "ACCELERATE_MIXED_PRECISION=fp8 around a plain training loop",
        "layers",
        "ACCELERATE_MIXED_PRECISION=fp8 is set and nothing in this program reads it",
        micro(),
    ),
    Control(
        "trainer-bf16",
        2,
        "bf16=True wins over the environment",
        "transformers TrainingArguments.__post_init__",
        "transformers' own Trainer(bf16=True) under ACCELERATE_MIXED_PRECISION=fp8",
        "layers",
        "Accelerate trains in bf16: bf16=True of the Trainer wins over it",
        micro(),
        needs=("accelerate",),
    ),
    Control(
        "odd-layer-stops",
        3,
        "a converter stops at the first odd Linear",
        "accelerate utils/transformer_engine.py, convert_model",
        "its loop, with a router of 10 outputs in each MLP",
        "layers",
        "a converter that stopped early",
        micro(model="own"),
        workload="router",
    ),
    Control(
        "forward-only",
        4,
        "forward in FP8, backward in BF16",
        "Unsloth load_in_fp8",
        "FP8 layers whose backward multiplies BF16",
        "layers",
        "forward in FP8, backward in high precision",
        micro(),
    ),
    Control(
        "wgrad-bf16",
        5,
        "only wgrad in BF16",
        "torchao recipe rowwise_with_gw_hp",
        "layers that say rowwise and multiply as rowwise_with_gw_hp",
        "layers",
        "the weight gradient was kept in high precision",
        micro("rowwise"),
    ),
    Control(
        "no-compile",
        6,
        "torchao without compile",
        "torchao float8 README",
        "the FP8 arm runs eagerly, the reference compiled",
        "speedup",
        "the FP8 arm was not compiled",
        ONE_B,
    ),
    Control(
        "recompute-bf16",
        7,
        "recomputation in BF16 under checkpointing",
        "Megatron-LM PR 7538",
        "activation checkpointing whose second forward pass is BF16",
        "layers",
        "recomputation under activation checkpointing runs outside the precision context",
        micro(activation_checkpointing=True),
    ),
    Control(
        "recipe-dropped",
        8,
        "the recipe asked for is dropped",
        "Accelerate's DeepSpeed path ignores the recipe handler",
        "rowwise is asked for, the library's default converts",
        "layers",
        "an option that was dropped on its way to the library",
        micro("rowwise"),
    ),
    Control(
        "eval-off",
        9,
        "eval() switches FP8 off",
        "Accelerate use_autocast_during_eval=False",
        "FP8 in train mode alone; training goes on in eval mode",
        "layers",
        "eval() switched FP8 off",
        micro(),
    ),
    Control(
        "nan-step-40",
        10,
        "NaN at step 40, finite before",
        "torchtitan issue 1056",
        "one weight becomes NaN before step 40",
        "loss",
        "loss is not finite from step 40 on",
        micro(loss_steps=42, loss_seeds=1),
    ),
    Control(
        "loss-drift",
        11,
        "the loss ends 3 % higher",
        "Megatron-LM issue 1152",
        "gradients under a share of their largest value are lost",
        "loss",
        "FP8 training ends at a higher loss than BF16",
        micro(),
    ),
    Control(
        "scale-off-by-two",
        12,
        "one layer's scale is off by two",
        USERS,
        "one layer's weight is scaled and unscaled by different factors",
        "layers",
        "a wrong scale",
        micro(),
    ),
    Control(
        "amax-frozen",
        13,
        "the amax history is never updated",
        USERS,
        "Transformer Engine's update does nothing after the first steps",
        "layers",
        "the amax history is never updated",
        tiny_te("delayed"),
        leaves_traces=True,
    ),
    Control(
        "other-data",
        14,
        "the FP8 arm trains on other data",
        USERS,
        "its batches come from another seed",
        "loss",
        "the arms trained on different data",
        micro(),
    ),
    Control(
        "fp8-off",
        15,
        "FP8 is off, both curves bit-equal",
        USERS,
        "FP8 layers by name that multiply BF16",
        "loss",
        "FP8 was off",
        micro(),
    ),
    Control(
        "fp8-slower",
        16,
        "FP8 3 % slower than its baseline",
        USERS,
        "the GPU spins for 3 % of each step",
        "speedup",
        "FP8 lost speed against BF16 since the baseline",
        CLOSE,
    ),
    Control(
        "both-slower",
        17,
        "both arms 10 % slower",
        "hosts of one kind differ by 5 %",
        "the GPU spins for 10 % of each step in both arms",
        "speedup",
        "",
        ONE_B,
        verdicts=("PASS", "INVALID"),
        breaks=("fp8", "bf16"),
    ),
    Control(
        "slow-attention",
        18,
        "the reference on a slow attention kernel",
        "Transformer Engine beside a second cuDNN",
        "the reference is held to memory-efficient attention",
        "speedup",
        "the arms ran different attention kernels",
        ONE_B,
        verdicts=("INVALID",),
        breaks=("bf16",),
    ),
    Control(
        "stored-in-fp8",
        19,
        "weights stored in FP8",
        USERS,
        "the converted layers' weights are saved as e4m3",
        "checkpoints",
        "weights were stored in FP8",
        micro(),
    ),
    Control(
        "prefixed-keys",
        20,
        "prefixed keys loaded into nothing",
        USERS,
        "keys carry _orig_mod., load_state_dict(strict=False)",
        "checkpoints",
        "the checkpoint was loaded into nothing",
        micro(),
        breaks=("fp8", "bf16"),
    ),
    Control(
        "optimizer-lost",
        21,
        "weights loaded, optimizer not",
        USERS,
        "the stored optimizer state is not read",
        "checkpoints",
        "weights were loaded and the optimizer was not",
        micro(),
    ),
    Control(
        "memory-up",
        22,
        "memory up by two thirds",
        USERS,
        "an allocation of two thirds of the peak is kept",
        "memory",
        "FP8 takes more memory against BF16 than in the baseline",
        TINY,
    ),
    Control(
        "head-converted",
        23,
        "lm_head converted although excluded",
        "torchao convert_to_float8_training(module_filter_fn)",
        "the filter is not passed",
        "layers",
        "lm_head left alone",
        micro(),
    ),
    Control(
        "adapters-converted",
        24,
        "LoRA adapters converted",
        "torchao convert_to_float8_training(module_filter_fn)",
        "peft adapters, a filter that knows lm_head alone",
        "layers",
        "was an adapter",
        micro(model="own"),
        workload="adapters",
        needs=("peft",),
    ),
    Control(
        "foreign-baseline",
        25,
        "another GPU's baseline under this name",
        USERS,
        "an H100's file in the H200's folder",
        "baseline",
        "is a baseline of another GPU",
    ),
    Control(
        "all-skipped",
        26,
        "every test skipped on a declared GPU",
        USERS,
        "pytest --fp8-gpu=h200 where no GPU is visible",
        "session",
        "A gate that ran nothing is not green",
    ),
    Control(
        "wrong-library",
        27,
        "both libraries installed, the wrong one chosen",
        "Accelerate's choice of FP8 backend",
        "torchao converts the arm that Transformer Engine was meant for",
        "layers",
        "both libraries are installed and nobody said which to use",
        tiny_te("current"),
    ),
    Control(
        "nan-one-run-in-four",
        28,
        "NaN in one run out of four",
        "torchao PR 4652",
        "one weight becomes NaN in one of four seeds",
        "loss",
        "seed 2",
        micro(loss_steps=14, loss_seeds=4),
    ),
    Control(
        "optimizer-too-early",
        29,
        "the optimizer knows the weights from before the conversion",
        "Accelerate's AORecipeKwargs(enable_fsdp_float8_all_gather=True) under transformers' Trainer",
        "each converted weight becomes a new parameter after the optimizer was made",
        "loss",
        "the optimizer was made before the conversion",
        micro(),
    ),
    Control(
        "model-unprepared",
        30,
        "Accelerate trains in fp8, the model was never given to it",
        "Accelerator.prepare converts what it is given, and says nothing where that is no model",
        "prepare(optimizer) alone",
        "layers",
        "prepare() was not given this model",
        micro(),
        needs=("accelerate",),
    ),
    Control(
        "tie-broken",
        31,
        "a tied head becomes a weight of its own",
        "accelerate utils/transformer_engine.py, convert_model: te_module.weight.copy_",
        "the head's weight is copied in the conversion",
        "checkpoints",
        "the model was untied",
        micro(model="own", resume=False),
        workload="tied",
    ),
    Control(
        "launch-drops-environment",
        32,
        "accelerate launch overwrites ACCELERATE_MIXED_PRECISION",
        "accelerate commands/launch.py: mixed_precision is no where no file or argument says otherwise",
        "ACCELERATE_MIXED_PRECISION=fp8 accelerate launch, without a config file",
        "precision",
        "accelerate launch without a file or --mixed_precision wins over it",
        needs=("accelerate",),
    ),
)
