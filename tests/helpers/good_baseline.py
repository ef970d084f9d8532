"""A sound baseline, a session behind it, and what is read of them in a folder."""

from helpers.baselines import baseline, session
from pytest_fp8.baselines.store import Folder, read_baseline

GOOD = baseline("1b-torchao-rowwise", "abc", metrics={"speedup": [[0.1, 0.11], [0.12, 0.1]], "fp8_share": [0.78]})
LATER = session(metrics={"fp8_share": [0.8]}, date="2026-11-21", run="b" * 12)


def read(folder, gpu="h200", case="1b-torchao-rowwise", case_hash="abc"):
    source = folder if isinstance(folder, Folder) else Folder(folder)
    return read_baseline(source, gpu, case, case_hash)
