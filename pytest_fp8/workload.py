"""What an arm trains: how to build the model, where batches come from, what the loss is.

The zoo's models have one ready; a user's own model needs two functions::

    @pytest.fixture(scope="session")
    def fp8_workload():
        return Workload(build=make_my_model, batch=lambda step: torch.randn(32, 128, 512))
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

ARGUMENTS = {
    "build": (),
    "batch": ("step",),
    "loss": ("model", "batch"),
    "optimizer": ("parameters",),
    "step": ("model", "batch", "optimizer", "precision"),
    "convert": ("model",),
    "precision": (),
    "save": ("model", "optimizer", "folder"),
    "load": ("model", "optimizer", "folder"),
    "parallelize": ("model", "mesh"),
    "trainer": ("model",),
}
"""The functions of a workload, and the arguments that each is called with."""

MADE_IN_ARMS = "each arm makes its model, batches and optimizer itself, in a process of its own, from a seed"


@dataclass(frozen=True)
class Workload:
    """A user's own model. All functions run inside the arm's process, never in pytest's.

    ``build()`` gives the ``torch.nn.Module``. The arm moves it to its device in bfloat16; one with parameters in
    bfloat16 already keeps its float32 parts. ``batch(step)`` gives one batch: a tensor, or what holds tensors: a dict
    or another mapping, list, tuple, deque, dataclass or object of your own. The generators of
    torch, numpy and Python are seeded before each call of the two, so that every arm gets the same weights and data.
    ``loss(model, batch)`` gives a scalar tensor. Without it the model is called with the batch, with a dict's entries
    by name, and its result, or that result's ``.loss``, is the loss. ``optimizer(parameters)`` gives the optimizer;
    a function whose argument is called ``model``, ``optimizer(model)``, is given the model itself, for groups by name.
    Without it the arm uses AdamW with ``learning_rate``, by default 1e-3, or 2e-4 with adapters. A learning-rate
    schedule goes to ``optimizer.scheduler``: it is then restarted, saved and loaded with the optimizer.

    ``leave``: name patterns of Linears that stay in high precision, e.g. ``"*.router"``.

    ``step(model, batch, optimizer, precision)`` is a hand-written training step with everything in it: accumulation,
    clipping, evaluation now and then. It gives the step's mean loss as a tensor; ``loss`` is not used then. ``with
    precision():`` around the forward pass is the FP8 arm's context (Transformer Engine's autocast) and does nothing in
    the BF16 arm. A call of the model without gradients is evaluation, which speed and memory do not count.

    ``convert(model)`` switches FP8 on in your own way, in the FP8 arm alone and in place of the backend's conversion.
    It gives the model, or nothing where it works in place. ``precision()`` gives a context of your own likewise. A
    Linear that ``convert`` leaves though its size and name would allow FP8 must be in ``leave``, or the layers question
    fails, because a filtered Linear and a forgotten one look alike.

    ``save(model, optimizer, folder)`` and ``load(model, optimizer, folder)`` are your own way to keep a checkpoint, and
    the checkpoint question then goes through them, too, from FP8 to BF16 and back. ``folder`` is a ``pathlib.Path`` of
    an empty folder. ``save`` writes all that training needs to go on: weights, the optimizer's state, the schedule.
    ``load`` is given a model and an optimizer of the same kind with other values, and puts the stored ones into them in
    place. What it returns is not used. Neither may change how training goes on otherwise. They are no part of
    :meth:`fingerprint`.

    ``parallelize(model, mesh)`` is your own set-up of several GPUs, with ``parallel="own"`` in the mark. It is called
    on each rank once the model is converted and compiled, and gives the model, or nothing where it works in place.
    ``mesh`` is a ``DeviceMesh`` of all ranks. ``batch(step)`` must give this rank's part of the batch.

    ``trainer(model)`` gives your Trainer of the model that ``build()`` made: transformers' own, or one derived from it
    such as TRL's SFTTrainer. What an arm trains is then the Trainer's model; batches come from its dataset and its
    collator, and a step is its ``training_step`` for each micro-batch, its clipping and its optimizer at its
    ``learning_rate``, without its schedule. ``batch``, ``step`` and ``optimizer`` are needed only to replace these, and
    ``loss`` is not used. Make its arguments inside: they read the precision from the environment, which is that of
    ``accelerate launch`` in the FP8 arm of ``trainer_te`` and ``trainer_torchao`` and says nothing of FP8 otherwise.

    ``version``: raise it after a change that :meth:`fingerprint` cannot see, so that no stored baseline is compared
    with the changed workload.
    """

    build: Callable[[], Any]
    batch: Callable[[int], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    step: Callable[[Any, Any, Any, Callable[[], Any]], Any] | None = None
    convert: Callable[[Any], Any] | None = None
    precision: Callable[[], Any] | None = None
    leave: tuple[str, ...] = ()
    learning_rate: float | None = None
    version: int | str = ""
    save: Callable[[Any, Any, Any], Any] | None = None
    load: Callable[[Any, Any, Any], Any] | None = None
    parallelize: Callable[[Any, Any], Any] | None = None
    trainer: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        """Raise :class:`SettingsError` for what is no function, or takes other arguments than it will be given."""
        __tracebackhide__ = True
        for name, given in ARGUMENTS.items():
            function = getattr(self, name)
            if function is not None or name == "build" or (name == "batch" and self.trainer is None):
                require_function(f"the workload's {name}=", name, function, given, MADE_IN_ARMS)
        if isinstance(self.leave, str) or not all(isinstance(each, str) for each in self.leave):
            refuse(
                R.BAD_VALUE,
                "the workload's leave= cannot be used",
                expected="a tuple of name patterns: leave=('*.router',)",
                seen=f"{self.leave!r:.80}, a {type(self.leave).__name__}",
                cause="without a comma the brackets make no tuple" if isinstance(self.leave, str) else "",
            )

    def fingerprint(self, first_step: str) -> str:
        """16 hex digits for the hash of the case: equal in every process, Python and checkout folder.

        Two parts count. ``first_step`` is the reference arm's hash of what its first step executed
        (:mod:`pytest_fp8.worker.first_step`): parameters, buffers, module classes, the batch's shapes, the calls of
        modules with weights. The source text of this workload's own functions (:mod:`pytest_fp8.source_text`) counts
        with its other fields, ``version`` among them.

        It does not see the text of functions that these call, unless another shape or module comes of it; values that
        they close over or that their module holds, such as a learning rate; the content of data and weights; what
        libraries compute inside the modules that they build. Raise ``version`` when one of these changes on purpose.
        Where functions draw sizes at random, the hash is another one in each run.
        """
        from pytest_fp8.source_text import text_of

        # A field at its default is left out, so that a new field changes no stored hash.
        held = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        # These change no number that a baseline holds, as a case's checkpoint_formats does not.
        held = {name: value for name, value in held.items() if name not in ("save", "load")}
        return hashlib.sha256(f"{first_step} {text_of(held)}".encode()).hexdigest()[:16]

    def _require_both(self) -> None:
        if (self.save is None) != (self.load is None):
            refuse(
                R.SAVE_WITHOUT_LOAD,
                "a workload needs both save= and load=, or neither",
                expected="save(model, optimizer, folder) and load(model, optimizer, folder)",
                seen="save= alone" if self.load is None else "load= alone",
            )

    def ship(self, asked_by: str = "") -> str:
        """The workload as text that an arm's process can rebuild (:func:`pytest_fp8.shipping.ship`)."""
        from pytest_fp8.shipping import ship

        self._require_both()
        return ship(self, "the workload's functions", asked_by)


def require_function(what: str, name: str, function: Any, arguments: tuple[str, ...], cause: str = "") -> None:
    """Raise :class:`SettingsError` unless ``function`` can be called with these arguments. ``what``, ``name``: what a
    message calls it, and the argument that takes it. ``cause``: why it must be a function."""
    __tracebackhide__ = True
    # A model is callable as well, and so is its class, which is a function that makes one.
    seen = f"{type(function).__name__} {function!r:.80}"
    if callable(function) and not (hasattr(function, "named_parameters") and not isinstance(function, type)):
        try:
            inspect.signature(function).bind(*arguments)
            return
        except ValueError:
            return  # some functions written in C tell no signature
        except TypeError as error:
            seen = f"{getattr(function, '__qualname__', type(function).__name__)}: {error}"
    refuse(
        R.NOT_A_FUNCTION,
        f"{what} is no function that can be called as it will be",
        expected=f"a function, called as {name}({', '.join(arguments)})",
        seen=seen,
        cause=cause,
        next_step=f"{name}=lambda{' ' if arguments else ''}{', '.join(arguments)}: ...",
    )
