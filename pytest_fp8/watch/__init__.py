"""``pytest-fp8 watch``: what an unmodified training script really computed in FP8.

``inject/`` is all that a script's process finds at its start. ``observer`` and ``model`` run there, once torch's
optimizers are imported, and write one file of evidence for each process; ``trace``, ``attribution``, ``judge``,
``report`` and ``command`` read the files afterwards, without torch.
"""

FOLDER, HOLD = "PYTEST_FP8_WATCH_FOLDER", "PYTEST_FP8_HOLD"
"""As in ``inject/``: the variables that name the folder of the evidence, and the socket of a pytest that holds the
script."""
FINISHED, RUNNING, FAILED = "finished", "running", "failed"
"""The states of evidence."""
