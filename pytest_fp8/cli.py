"""``pytest-fp8``: the command line, which only dispatches to its commands. Loads no torch.

Exit codes: 0 nothing wrong, 1 something got worse or is broken, 2 a question that could not be answered.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from pytest_fp8.baselines.command import OK, UNANSWERED, add_baselines
from pytest_fp8.codes.pages import add_explain
from pytest_fp8.doctor import add_doctor
from pytest_fp8.ending import Endings
from pytest_fp8.errors import Fp8Error
from pytest_fp8.libraries import documentation, library_versions
from pytest_fp8.report.files import add_report
from pytest_fp8.suites_command import add_suites
from pytest_fp8.watch.command import add_watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code. argparse itself exits with 2 on a usage error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name of a file or a case may hold what the terminal's encoding cannot: it is written as \\xf6, as in errors.
        sys.stdout.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    endings = Endings()
    endings.take()
    try:
        code: int = options.run(options)
    except Fp8Error as error:
        print(error.message, file=sys.stderr)
        return UNANSWERED
    except BrokenPipeError:
        # `| head` has read enough.
        sys.stderr.close()
        return OK
    except KeyboardInterrupt as end:
        # Arms are closed and folders removed by now.
        print(f"pytest-fp8: ended by {str(end) or 'Ctrl-C'}, without an answer", file=sys.stderr)
        return UNANSWERED
    finally:
        endings.give_back()
    return code


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pytest-fp8",
        description="Tests of FP8 training: is it on, is it right, is it faster?",
        epilog=f"documentation: {documentation()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = library_versions(["pytest-fp8"]).get("pytest-fp8", "(not installed)")
    top.add_argument("--version", action="version", version=f"pytest-fp8 {version}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_baselines(commands)
    add_doctor(commands)
    add_explain(commands)
    add_report(commands)
    add_suites(commands)
    add_watch(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
