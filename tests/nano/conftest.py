"""The scripts of `deploy/nano` are programs, not a package: tests import them from their folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "nano"))
