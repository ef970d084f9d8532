"""Makes the suite's case list importable from its test files, wherever pytest was started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "suites"))
