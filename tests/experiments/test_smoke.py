"""The scripts of experiments/ refuse wrong arguments."""

import pytest

from tests.conftest import run_script

REFUSED = {
    "--programs=pair_65x192: no such program (did you mean 'pair_65x129'?)": ("speed/gpu.py", "--programs=pair_65x192"),
    "README.md: holds no lines <!-- tables:begin -->": ("paper/tables.py", "--markdown=README.md"),
    "--figure needs --suite=scaling": ("speed/benchmark.py", "--figure=a.png"),
    "must end in .png or": ("paper/study.py", "--figure=figure.txt"),
    "no compiled recipe with 'none' in its name": ("tpu/pod.py", "--only=none"),
    "--csv needs --all": ("tpu/tpu.py", "--csv=tpu.csv"),
}


@pytest.mark.slow  # the imports take seconds each
@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_one_line(message):
    done = run_script(*REFUSED[message])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
