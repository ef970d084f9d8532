"""What code in an arm may do to its process. Each function runs inside an arm, as a user's own would."""

from importlib import import_module

from benchmarks.faults.misbehaviours.entries import ANSWERS, CATALOGUE, Misbehaviour

__all__ = ["ANSWERS", "CATALOGUE", "Misbehaviour"]

# In the order in which they are tried: the last of the surroundings is the last of all.
for _each in ("deaths", "errors", "hangs", "output", "children", "surroundings"):
    import_module(f"{__name__}.{_each}")
