"""The scripts of experiments/ are imported by their names, as they import each other."""

import sys

from tests.conftest import ROOT

sys.path[:0] = [str(ROOT / "experiments" / folder) for folder in ("paper", "speed", "tpu")]
