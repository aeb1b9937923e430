"""Mutation testing with cosmic-ray, for scripts/mutants.sh.

A mutant is the code with one change: another number or operator, a negated condition, or a loop without iterations. A
mutant is killed if a test of its module fails, or if the tests take over five times as long as without the change. The
script tries a random sample of all mutants in random order. The mutants of an interrupted run are a random sample too.

The script leaves out replacements of `|`, because annotations use it. It also leaves out mutants that are not valid
Python, because cosmic-ray replaces the stars of `*args` like operators. Strings and docstrings do not change.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutants" / "tree"
MODULES = "io/*.py metrics/*.py data/levels.py data/tfrecord.py".split()
MODULES += ["tasks/segmentation/losses.py", "tasks/segmentation/grouping.py"]
PROPERTIES = "metrics/test_properties.py"
# Test files of the modules whose tests are not only in FOLDER/test_NAME.py.
TESTS = {
    "io/gfile.py": ["io/test_write.py", "data/test_tfrecord.py"],
    "io/images.py": ["io/test_images.py", "data/test_files.py", "data/test_decode.py"],
    "io/lock.py": ["io/test_write.py"],
    "io/page.py": ["io/test_show.py"],
    "io/paths.py": ["io/test_paths.py", "io/test_write.py"],
    "metrics/coco_ap.py": ["tasks/detection/test_detection_evaluator.py", PROPERTIES],
    "metrics/matching.py": ["metrics/test_matching.py", PROPERTIES],
    "metrics/mean_iou.py": [PROPERTIES],
    "metrics/panoptic_quality.py": ["metrics/test_panoptic_quality.py", PROPERTIES],
    "tasks/segmentation/losses.py": ["tasks/segmentation/test_losses.py", "tasks/segmentation/test_targets.py"],
    "tasks/segmentation/grouping.py": [
        "tasks/segmentation/test_grouping.py",
        "tasks/segmentation/test_grouping_properties.py",
    ],
    "data/levels.py": ["data/test_levels.py", "data/test_decode.py", "io/test_images.py"],
    "data/tfrecord.py": ["data/test_tfrecord.py", "data/test_damaged_records.py"],
}
# pytest's arguments. Slow tests and tests that read all source files do not run.
PYTEST = "-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts="
PYTEST += "-k", "not test_all_code"
LIMIT = 6 * 2**30  # bytes of memory that the tests of a mutant may use
KINDS = "killed", "too long", "survived"


def modules():
    """Paths of the modules to mutate, relative to the repository."""
    return sorted(path.relative_to(ROOT) for pattern in MODULES for path in (ROOT / "axial").glob(pattern))


def tests_of(module):
    """Paths of a module's test files, relative to the repository."""
    name = module.relative_to("axial")
    return tuple(f"tests/{test}" for test in TESTS.get(str(name), [name.parent / f"test_{name.name}"]))


def draw(sample, seed):
    """Draws a random sample of the mutations of all modules."""
    with use_db(":memory:") as db:
        init(modules(), db, {})
        mutations = [item.mutations[0] for item in db.work_items]
    mutations = [m for m in mutations if not m.operator_name.startswith("core/ReplaceBinaryOperator_BitOr")]
    mutations.sort(key=lambda m: (str(m.module_path), m.operator_name, m.occurrence))
    random.Random(seed).shuffle(mutations)
    print(f"{sample} of {len(mutations)} mutants, seed {seed}", flush=True)
    return mutations[:sample]


def copy_tree(tree):
    """Copies this repository to a folder, without files that git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def positional(code):
    """Number of positional-only parameters. A mutant may have more: cosmic-ray may replace a '*' parameter by '/'."""
    return sum(len(node.posonlyargs) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.arguments))


def run_tests(tree, tests, seconds):
    """Whether tests pass in a copy of the repository, or None if they take longer than `seconds`."""
    command = [sys.executable, "-m", "pytest", *PYTEST, f"--rootdir={tree}", f"--basetemp={tree}.tmp", *tests]
    # Python would reuse the bytecode of a mutant for another one that is written in the same second.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **quiet)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (LIMIT, LIMIT))
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also kills the processes that the tests have started


def limit_of(tree, tests):
    """Time limit for a mutant's tests: a minute plus five times the seconds of the unmutated code, which must pass."""
    begin = time.monotonic()
    if not run_tests(tree, tests, 1800):
        sys.exit(f"without a mutation these tests must pass: {' '.join(tests)}")
    return 5 * (time.monotonic() - begin) + 60


def attempt(mutation, tree, seconds):
    """Tests a mutant in a copy of the repository. Returns (one of `KINDS`, diff), or None if it is not valid Python."""
    path, operator = tree / mutation.module_path, get_operator(mutation.operator_name)(**mutation.operator_args)
    code = path.read_text()
    try:
        if positional(mutate_code(code, operator, mutation.occurrence)) != positional(code):
            return None
    except (SyntaxError, AttributeError):  # cosmic-ray cannot replace an exception whose name has a dot
        return None
    with use_mutation(path, operator, mutation.occurrence) as codes:
        passed = run_tests(tree, tests_of(mutation.module_path), seconds)
    diff = difflib.unified_diff(*(code.splitlines() for code in codes), lineterm="", n=1)
    return KINDS[1 if passed is None else 2 * passed], "\n".join(diff)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    flags = parser.parse_args()
    os.chdir(ROOT)
    mutations, rooms = draw(flags.sample, flags.seed), collections.defaultdict(collections.Counter)
    copy_tree(TREE)
    suites = {tests_of(mutation.module_path) for mutation in mutations}
    limits = {tests: limit_of(TREE, tests) for tests in sorted(suites)}
    for mutation in mutations:
        kind, diff = attempt(mutation, TREE, limits[tests_of(mutation.module_path)]) or ("", "")
        for room in (str(mutation.module_path.parent), "all") if kind else ():
            rooms[room][kind] += 1
        print(
            f"{kind or 'no Python'} {mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}", flush=True
        )
        if kind == KINDS[2]:
            print(f"{diff}\n", flush=True)
    print(f"\n{'':26}" + "".join(f"{kind:>10}" for kind in (*KINDS, "score")))
    for room, counts in sorted(rooms.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        score = f"{1 - counts[KINDS[2]] / counts.total():.1%}"
        print(f"{room:26}" + "".join(f"{text:>10}" for text in (*(counts[kind] for kind in KINDS), score)))


if __name__ == "__main__":
    main()
