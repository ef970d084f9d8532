"""What people say about FP8 training, held against stored baselines.

    python -m benchmarks.claims [--baselines FOLDER ...] [--gpu h200 h100] [--markdown | --json]

Instant: it reads baselines, and measures nothing. A claim fails nothing: the exit code is 0 whatever the verdicts, and
2 where the baselines cannot be read. ``--markdown`` makes the page docs/claims.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims import CLAIMS, judge
from benchmarks.claims.page import markdown, print_claims, to_json
from benchmarks.claims.stored import BASELINES, MEASURED, stored_on
from pytest_fp8.errors import Fp8Error

GPUS = ("h200", "h100")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every claim, print, and return the exit code. argparse itself exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--baselines",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        default=[BASELINES, MEASURED],
        help=f"the first that has a case counts (default: {BASELINES} {MEASURED})",
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        default=GPUS,
        help=f"whose baselines: a claim's own GPU first, then the first with the case (default: {' '.join(GPUS)})",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="as the page docs/claims.md")
    how.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        stored = {gpu: stored_on(gpu, options.baselines) for gpu in options.gpu}
    except Fp8Error as error:
        print(error.message, file=sys.stderr)
        return 2
    findings = [judge(claim, stored) for claim in CLAIMS]
    if options.json:
        print(json.dumps([to_json(finding) for finding in findings], indent=1))
    elif options.markdown:
        print("\n".join(markdown(findings, stored)))
    else:
        print_claims(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
