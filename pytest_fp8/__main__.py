"""``python -m pytest_fp8``: the command ``pytest-fp8``."""

import sys

from pytest_fp8.cli import main

sys.exit(main())
