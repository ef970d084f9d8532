"""``pytest-fp8 watch``: what an unmodified training script really computed in FP8.

``inject/`` is all that a script's process finds at its start. ``observer`` and ``model`` run there, once torch's
optimizers are imported, and write one file of evidence for each process; ``trace``, ``attribution``, ``judge``,
``report`` and ``command`` read the files afterwards, without torch.
"""
