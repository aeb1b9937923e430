"""Kills a converter many times. In the end its output must equal that of one uninterrupted run."""

import json
import os
import subprocess
import sys

from axial.data.convert import convert_split, encode_item

# Forks a converter many times and kills it each time. It forks before TensorFlow has started any thread.
KILLER = """
import importlib, json, os, random, signal, sys, time
from axial.data import convert
from axial.data.specs import DatasetSpec
from axial.io import schemas
from axial.io.read import convert as as_schema

module, function, arguments, split, output, spec, times = json.loads(sys.argv[1])

def child(kill_after):
    pid = os.fork()
    if not pid:
        items, source = getattr(importlib.import_module(module), function)(*arguments)

        def slow(item):
            ends = kill_after is None or item is not items[-1]  # only the one that is not killed gets to the end
            time.sleep(0.02 if ends else 3600)
            return convert.encode_item(item)

        options = {"output_dir": output, "source": source, "shards": 20, "workers": 1, "progress": False}
        known = DatasetSpec.from_schema("spec", as_schema("spec", spec, schemas.Spec))
        convert.convert_split(items, slow, known, split, **options)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]

rng = random.Random(0)
print(sum(child(rng.uniform(0.02, 0.2)) == signal.SIGKILL for _ in range(times)), child(None))
"""


def check_killed(items_of, arguments, split, spec, folder, times=20):
    """Asserts that a conversion which is killed `times` times has the same bytes in the end as an uninterrupted one.

    Args:
        items_of: function of `arguments` that returns at least 60 items and their source.
        arguments: list that JSON can hold.
        split, spec: arguments of `convert_split`.
        folder: path of an empty folder to work in.
    """
    items, source = items_of(*arguments)
    whole, killed = folder / "whole", folder / "killed"
    convert_split(items, encode_item, spec, split, output_dir=str(whole), source=source, shards=20, progress=False)
    task = [items_of.__module__, items_of.__name__, arguments, split, str(killed), spec.to_json(), times]
    command = [sys.executable, "-c", KILLER, json.dumps(task)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert list(map(int, output.split())) == [times, 0]
    names = sorted(os.listdir(whole))
    assert sorted(os.listdir(killed)) == names and len(names) == 21
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
