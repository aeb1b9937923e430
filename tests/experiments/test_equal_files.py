"""Files of the shipped model segment photos of odd sizes as its SavedModel does; see equal_files.py."""

import pytest

from tests.conftest import run_script


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("form", ["onnx", "tflite"])
def test_files_equal_the_savedmodel(form):
    done = run_script("speed/equal_files.py", f"--format={form}", "--photos=12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 photos" in done.stdout and ": 0 differ" in done.stdout
