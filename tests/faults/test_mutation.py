"""Mutated files of runs, exports, data and photos: each ends in the right result, or in one line and exit code 2.

scripts/test.sh tests/faults                      a sample
scripts/test.sh -n 0 -m slow tests/faults         200 mutations of every kind; AXIAL_SEED chooses others
"""

import json
import os
import random
import shutil
import time
import zlib

import pytest

from axial.data.coco import SAMPLE_DIR

TINY = ("--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin")
SEED = int(os.environ.get("AXIAL_SEED", "0"))
# Of each kind: the folder, the files, and whether a mutation that no format can notice may change the result.
KINDS = {
    "manifest": ("data", "*.json", False),
    "records": ("data", "*.tfrecord", False),
    "run's spec": ("run", "spec.json", True),
    "run's configuration": ("run", "config.gin", True),
    "list of checkpoints": ("run", "checkpoint", True),
    "checkpoint": ("run", "ckpt-*", False),
    "export": ("export", "**/*", False),
    "photo": ("photos", "*.jpg", True),
}
EXPORT = ("export",)


@pytest.fixture(scope="module")
def whole(command, sample_dir, tmp_path_factory):
    """A folder with data, a run, an export and photos, and what evaluation says of them."""
    root = tmp_path_factory.mktemp("whole")
    shutil.copytree(sample_dir, root / "data")
    bindings = ["--gin_binding=TrainingConfig.eval_interval = 0"]
    assert command("train", *TINY, *bindings, f"--data_dir={root}/data", f"--model_dir={root}/run").code == 0
    assert command("export", f"--model_dir={root}/run", f"--output_dir={root}/export").code == 0
    (root / "photos").mkdir()
    shutil.copy(os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg"), root / "photos")
    return root


def call(command, folder, root):
    """(exit code, result or None, the line) of the command that reads a folder."""
    scores = root / "scores.json"
    if folder == "photos":
        photos = sorted((root / "photos").iterdir())
        result = command("predict", f"--saved_model={root}/export", f"--output_dir={root}/out", *photos)
        return result, None
    source = f"--saved_model={root}/export" if folder in EXPORT else f"--model_dir={root}/run"
    result = command("evaluate", source, f"--data_dir={root}/data", "--split=val2017", f"--json={scores}")
    return result, json.loads(scores.read_text()) if scores.exists() else None


def mutate(rng, path):
    """Changes a file. Returns what it did."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flips", "cut", "empty", "delete", "zeros", "insert", "swap"])
    if kind == "delete":
        path.unlink()
        return kind
    if kind == "empty" or not data:
        data = bytearray()
    elif kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "zeros":
        start = rng.randrange(len(data))
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    elif kind == "insert":
        data[rng.randrange(len(data)) : 0] = rng.randbytes(8)
    else:
        a, b = sorted(rng.randrange(len(data)) for _ in range(2))
        data = data[:a] + data[b:] + data[a:b]
    path.write_bytes(data)
    return kind


def check(command, whole, tmp_path, kind, rng):
    folder, pattern, free = KINDS[kind]
    root = tmp_path / str(rng.random())
    shutil.copytree(whole, root)
    files = sorted(path for path in (root / folder).glob(pattern) if path.is_file())
    path = rng.choice(files)
    before = zlib.crc32(path.read_bytes())
    done = mutate(rng, path)
    start = time.monotonic()
    result, scores = call(command, folder, root)
    what = f"{done} of {path.relative_to(root)}: exit code {result.code}\n{result.err[-2000:]}"
    assert "Traceback" not in result.err, what
    assert result.code in (0, 2) and time.monotonic() - start < 60, what
    if result.code == 2:
        assert result.line.startswith("axial-"), what
    elif not free and path.exists() and zlib.crc32(path.read_bytes()) != before:
        _, expected = call(command, folder, whole)
        assert scores == expected, what
    shutil.rmtree(root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation(command, whole, tmp_path, kind):
    check(command, whole, tmp_path, kind, random.Random(f"{SEED} {kind}"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations(command, whole, tmp_path, kind, number):
    check(command, whole, tmp_path, kind, random.Random(f"{SEED} {kind} {number}"))
