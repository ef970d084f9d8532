"""What people say about FP8 training, held against stored baselines: the page docs/claims.md.

    python -m benchmarks.claims > docs/claims.md

Instant: it reads baselines, and measures nothing. A claim fails nothing. Loads no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.claims import cases
from benchmarks.claims.judge import (
    BETWEEN_HOSTS,
    DID_NOT_HOLD,
    HELD,
    LEARNS_TOO_LITTLE,
    METRICS,
    NOT_MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    TOLERANCE,
    Claim,
    Finding,
    claims,
    judge,
)
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import read_folder, readable
from pytest_fp8.report.baselines import libraries_of

BASELINES, MEASURED = Path("baselines"), Path("benchmarks/claims/measured")
GPUS = ("h200", "h100")
WORDS = (HELD, DID_NOT_HOLD, NOT_REPRODUCED, PARTLY, NOT_MEASURED)
RULE = f"""\
Each measurement is an interval: 99 % for a speedup, what sessions on other machines differ by included; 95 % on each
side over seeds for a loss gap; step times of two cases and tokens per second are widened by {BETWEEN_HOSTS:.0%}, which
hosts differ by. A claimed ratio or rate is widened by {TOLERANCE:.0%} at each end, a gap in nats and a number of layers
are not. `at least` one figure is kept by all above it, `at most` one by all below it; `about` one is what somebody saw.
A range is kept by what lies within it.

A claim *held* where the whole interval lies inside, and held *partly* where it reaches across an end, or is too wide to
tell. Where all of it lies outside, the claim *did not hold* if the same configuration was measured here, and was *not
reproduced here* if the configuration differs: what somebody saw elsewhere may have been so there. The last column
names the case that was measured, and in what it differs from what the claim is about."""
HEAD = ("| claim | figure | measured | verdict | measured with, and what differs |", "|---|---|---|---|---|")


def all_claims() -> dict[str, Claim]:
    """With the cases of the suite and of this folder."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))
    import matrix

    return claims({case.id: case for case in [*matrix.ALL, *cases.ALL]})


def stored_on(gpu: str, folders: Iterable[Path]) -> dict[str, Baseline]:
    """The baselines of a GPU by case; the first folder that has a case counts. Raises :class:`BaselineError`."""
    found: dict[str, Baseline] = {}
    for folder in folders:
        for (key, case), baseline in readable(read_folder(folder)).items():
            if key == gpu:
                found.setdefault(case, baseline)
    return found


def markdown(findings: Sequence[Finding], stored: Mapping[str, Mapping[str, Baseline]]) -> list[str]:
    """The page ``docs/claims.md``: the rule, and a table for each source."""
    counted = Counter(finding.verdict for finding in findings)
    lines = [
        "# What people say about FP8 training, and what was measured here",
        "",
        f"Made by `python -m benchmarks.claims` from stored figures of {' and '.join(stored)}, not written",
        f"by hand: those of the suite's cases, and those of cases that no gate asks (`{MEASURED}/`).",
        "A claim about one of these GPUs is held against its figures where the case was measured there.",
        f"Measured {measured_when(findings, stored)}.",
        f"{len(findings)} claims: " + ", ".join(f"{counted[word]} {word}" for word in WORDS) + ".",
        "",
        RULE,
    ]
    for source in dict.fromkeys(finding.claim.source for finding in findings):
        name = f"[{source.name}]({source.url})" if source.url else source.name[0].upper() + source.name[1:]
        lines += ["", f"## {name} ({source.kind})", "", *HEAD]
        lines += [_row(finding) for finding in findings if finding.claim.source == source]
    return lines


def measured_when(findings: Iterable[Finding], stored: Mapping[str, Mapping[str, Baseline]]) -> str:
    """The days on which the cases behind these findings were last measured, by the libraries that they ran."""
    days: dict[str, set[str]] = {}
    for finding in findings:
        for case in (finding.near.case, finding.near.other) if finding.reading else ():
            if case is not None:
                newest = stored[finding.gpu][case.id].newest
                days.setdefault(libraries_of(newest), set()).add(newest.date)
    spans = {libraries: " to ".join(dict.fromkeys((min(on), max(on)))) for libraries, on in days.items()}
    return "; ".join(f"on {span} with {libraries}" for libraries, span in spans.items()) or "nothing yet"


def _row(finding: Finding) -> str:
    claim = finding.claim
    what = METRICS[claim.metric][0]
    return f"| {claim.says} | {what}: {claim.figure} | {finding.measured()} | {finding.verdict} | {_with(finding)} |"


def _with(finding: Finding) -> str:
    near = finding.near
    names = f"`{near.case.id}`" + (f" against `{near.other.id}`" if near.other else "")
    text = "; ".join([names, *(f"{name}: {what}" for name, what in finding.differs.items())])
    if finding.reading is None and LEARNS_TOO_LITTLE in finding.why:
        return f"{text} ({LEARNS_TOO_LITTLE})"
    nearer = finding.why if finding.reading else ()
    return text + (f" (nearer, but {'; '.join(nearer)})" if nearer else "")


def main() -> None:
    stored = {gpu: stored_on(gpu, [BASELINES, MEASURED]) for gpu in GPUS}
    findings = [judge(claim, stored) for claim in all_claims().values()]
    print("\n".join(markdown(findings, stored)))


if __name__ == "__main__":
    main()
