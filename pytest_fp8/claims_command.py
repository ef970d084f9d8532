"""``pytest-fp8 claims``: its arguments, and what it prints. Loads no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DESCRIPTION = """\
What people say about FP8 training, held against stored baselines. Claims do not fail: the exit code is 0 whatever
became of them, and 2 where a baseline cannot be read.
"""


def add_claims(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser(
        "claims", help="what people say about FP8, and what was measured", description=DESCRIPTION
    )
    add.add_argument("--dir", type=Path, default=Path("baselines"), help="folder of baselines (default: baselines)")
    add.add_argument("--gpu", default="h200", help="this GPU's baselines (default: h200)")
    how = add.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="as the page docs/claims.md")
    how.add_argument("--json", action="store_true", help="JSON instead of a table")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge every claim, print, and give the exit code."""
    from pytest_fp8.baselines.folder import read_folder, readable
    from pytest_fp8.claims import CLAIMS, judge
    from pytest_fp8.report.claims import markdown, print_claims, to_json

    stored = {
        case: baseline for (gpu, case), baseline in readable(read_folder(options.dir)).items() if gpu == options.gpu
    }
    findings = [judge(claim, stored) for claim in CLAIMS]
    if options.json:
        print(json.dumps([to_json(finding, options.gpu) for finding in findings], indent=1))
    elif options.markdown:
        print("\n".join(markdown(findings, options.gpu)))
    else:
        print_claims(findings, options.gpu)
    return 0
