"""Lets tests import the scripts of experiments/ by their module names, as the scripts import each other."""

import sys

import pytest

from axial.layers import device
from tests.conftest import ROOT

sys.path[:0] = [str(ROOT / "experiments" / folder) for folder in ("paper", "speed", "tpu")]


@pytest.fixture(scope="session")
def xla():
    """Skips a test of compiled programs if TensorFlow has no XLA for CPUs."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has no XLA for CPUs")
