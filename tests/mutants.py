"""Mutation testing with cosmic-ray, for scripts/mutants.sh.

A mutant is the code with one change: another number or operator, a condition negated, a loop that does nothing. It is
killed if a test of its module fails, or takes five times as long as without the change. A sample of all mutants is
drawn at random and tried in that order, so that the part of it that was tried is a sample too.

Left out are other operators between the types of an annotation, which cannot be imported, and what is no Python:
cosmic-ray takes the stars of arguments for operators. Texts stay as they are, docstrings among them.

Each mutant is tried in a fork of a process that has imported TensorFlow and has not used it: a fork after its first
operation hangs, and an import takes longer than most tests.
"""

import argparse
import ast
import collections
import compileall
import contextlib
import difflib
import importlib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutants"
MODULES = (
    "io/*.py",
    "metrics/*.py",
    "tasks/segmentation/losses.py",
    "tasks/segmentation/grouping.py",
    "data/tfrecord.py",
)
PROPERTIES = "metrics/test_properties.py"
# Of modules that have more tests than ROOM/test_NAME.py, or others.
TESTS = {
    "io/gfile.py": ["io/test_write.py", "data/test_tfrecord.py"],
    "io/lease.py": ["cloud/test_supervisor.py"],
    "io/lock.py": ["io/test_write.py"],
    "io/page.py": ["io/test_show.py"],
    "io/paths.py": ["io/test_paths.py", "io/test_write.py"],
    "metrics/coco_ap.py": ["tasks/detection/test_detection_evaluation.py"],
    "metrics/instance_ap.py": [PROPERTIES],
    "metrics/matching.py": ["metrics/test_matching.py", PROPERTIES],
    "metrics/mean_iou.py": ["metrics/test_mean_iou.py", PROPERTIES],
    "metrics/panoptic_quality.py": ["metrics/test_panoptic_quality.py", PROPERTIES],
    "tasks/segmentation/grouping.py": [
        "tasks/segmentation/test_grouping.py",
        "tasks/segmentation/test_grouping_properties.py",
    ],
    "data/tfrecord.py": ["data/test_tfrecord.py", "data/test_damaged_records.py"],
}
# What axial and its tests import of others, in the parent of all forks.
IMPORTS = "pytest tensorflow tensorflow_datasets tf_keras scipy.ndimage matplotlib.pyplot rich.table PIL.Image"
IMPORTS += " pycocotools.coco sacrebleu msgspec yaml tqdm hypothesis xdist"
# Without tests that read all source, or that look at nothing but the time.
PYTEST = "-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts="
PYTEST += "-k", "not (time_of_yaml_is_linear or test_every_place)"
LIMIT = 6 * 2**30  # bytes of memory of a mutant
KINDS = "killed", "too long", "survived"


def modules():
    """Paths below the tree of the modules that are mutated."""
    return sorted(path.relative_to(ROOT) for pattern in MODULES for path in (ROOT / "axial").glob(pattern))


def checksum(files):
    return f"{zlib.crc32(b''.join(file.read_bytes() for file in files)):08x}"


def tests_of(module):
    """Test files of a module, paths below the tree."""
    name = module.relative_to("axial")
    return tuple(f"tests/{test}" for test in TESTS.get(str(name), [name.parent / f"test_{name.name}"]))


def within_annotation(mutation):
    """Whether a mutation replaces an operator between the types of an annotation."""
    if not mutation.operator_name.startswith("core/ReplaceBinaryOperator_BitOr"):
        return False
    nodes = ast.walk(ast.parse((ROOT / mutation.module_path).read_text()))
    kinds = [kind for node in nodes for name in ("annotation", "returns") if (kind := getattr(node, name, None))]
    spans = [((kind.lineno, kind.col_offset), (kind.end_lineno, kind.end_col_offset)) for kind in kinds]
    return any(start <= mutation.start_pos < end for start, end in spans)


def draw(db, sample, seed):
    """Adds what is missing of the sample to the session."""
    if db.num_work_items >= sample:
        return
    with use_db(":memory:") as every:
        init(modules(), every, {})
        mutations = [item.mutations[0] for item in every.work_items]
    mutations = sorted(mutations, key=lambda m: (str(m.module_path), m.operator_name, m.occurrence))
    mutations = [mutation for mutation in mutations if not within_annotation(mutation)]
    random.Random(seed).shuffle(mutations)
    chosen = [WorkItem.single(f"{number:05}", mutation) for number, mutation in enumerate(mutations[:sample])]
    db.add_work_items(chosen[db.num_work_items :])
    print(f"{len(chosen)} of {len(mutations)} mutants, seed {seed}", flush=True)


def copy_tree(tree):
    """Makes a folder the same as this repository, without what git ignores."""
    tree.mkdir(parents=True, exist_ok=True)
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    compileall.compile_dir(tree / "axial", quiet=2)


def is_python(path, operator, occurrence):
    """Whether a mutation of a module changes Python as its operator says."""
    code = path.read_text()
    try:
        return of_position(mutate_code(code, operator, occurrence)) == of_position(code)
    except (SyntaxError, AttributeError):  # cosmic-ray cannot replace an exception whose name has a dot
        return False


def of_position(code):
    """How many arguments have no names for a caller: those before a '/', which cosmic-ray may write for a star."""
    return sum(len(node.posonlyargs) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.arguments))


def run_tests(tree, tests, seconds):
    """(whether the tests pass, or None after so many seconds, what pytest printed, the seconds it took)."""
    log, begin = tree.with_suffix(".log"), time.monotonic()
    pid = os.fork()
    if not pid:
        import pytest

        os.setsid()
        os.chdir(tree)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *sys.path]
        code = pytest.main([*PYTEST, f"--rootdir={tree}", f"--basetemp={tree.with_suffix('.tmp')}", *tests])
        sys.stdout.flush()
        os._exit(int(code))
    status = None
    while status is None and time.monotonic() - begin < seconds:
        time.sleep(0.1)
        done, status = os.waitpid(pid, os.WNOHANG)
        status = status if done else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # with what the tests have started
    if status is None:
        os.waitpid(pid, 0)
    return None if status is None else status == 0, log.read_text(errors="replace"), time.monotonic() - begin


def seconds_without(tree, tests):
    """Seconds of the tests without a mutation, which must pass; measured once for these tests and modules."""
    files = [tree / path for path in (*tests, *modules())]
    record = BUILD / f"{checksum(files)}.seconds"
    if not record.exists():
        passed, output, seconds = run_tests(tree, tests, 1800)
        if not passed:
            sys.exit(f"{output}\nwithout a mutation these tests must pass: {' '.join(tests)}")
        print(f"{seconds:.0f} s without a mutation: {' '.join(tests)}", flush=True)
        record.write_text(str(seconds))
    return float(record.read_text())


def work(session, tree, job_ids):
    """Tries mutants in a copy of the tree, one after the other."""
    with use_db(str(session)) as db:
        items = {item.job_id: item.mutations[0] for item in db.work_items}
        for job_id in job_ids:
            mutation = items[job_id]
            tests = tests_of(mutation.module_path)
            limit = 5 * seconds_without(tree, tests) + 60
            operator = get_operator(mutation.operator_name)(**mutation.operator_args)
            place = tree / mutation.module_path, operator, mutation.occurrence
            if not is_python(*place):
                db.set_result(job_id, WorkResult(WorkerOutcome.SKIPPED))
                continue
            with use_mutation(*place) as codes:
                passed, output, seconds = run_tests(tree, tests, limit)
            before, after = (code.splitlines() for code in codes)
            diff = "\n".join(difflib.unified_diff(before, after, lineterm="", n=1))
            outcome = TestOutcome.SURVIVED if passed else TestOutcome.KILLED
            output = KINDS[1] if passed is None else output[-2000:]
            db.set_result(job_id, WorkResult(WorkerOutcome.NORMAL, output, outcome, diff))
            place = f"{mutation.module_path}:{mutation.start_pos[0]}"
            print(f"{job_id} {outcome.value} {seconds:.0f} s {place} {mutation.operator_name}", flush=True)


def report(db):
    """Prints the survivors and the score of each room and of all."""
    rooms = collections.defaultdict(collections.Counter)
    for item, result in sorted(db.completed_work_items, key=lambda pair: pair[0].job_id):
        (mutation,) = item.mutations
        if result.worker_outcome == WorkerOutcome.SKIPPED:
            continue
        kind = KINDS[2] if not result.is_killed else KINDS[1] if result.output == KINDS[1] else KINDS[0]
        for room in (str(mutation.module_path.parent), "all"):
            rooms[room][kind] += 1
        if kind == KINDS[2]:
            print(f"\n{item.job_id} {mutation.module_path} {mutation.operator_name}\n{result.diff}")
    print(f"\n{'':26}" + "".join(f"{kind:>10}" for kind in (*KINDS, "score")))
    for room, counts in sorted(rooms.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        score = f"{1 - counts[KINDS[2]] / counts.total():.1%}"
        print(f"{room:26}" + "".join(f"{text:>10}" for text in (*(counts[kind] for kind in KINDS), score)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time")
    parser.add_argument("--again", action="store_true", help="also tries the survivors of an earlier run")
    flags = parser.parse_args()
    os.chdir(ROOT)
    session = BUILD / f"{flags.seed}-{checksum(modules())}.sqlite"
    BUILD.mkdir(parents=True, exist_ok=True)
    with use_db(str(session)) as db:
        draw(db, flags.sample, flags.seed)
        done = {job_id for job_id, result in db.results if result.is_killed or not flags.again}
        pending = sorted({item.job_id for item in db.work_items} - done)
    # Two mutants of the same second would share bytecode.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    for name in IMPORTS.split() if pending else ():
        importlib.import_module(name)
    workers = []
    for number in range(min(flags.jobs, len(pending))):
        copy_tree(BUILD / f"tree{number}")
        if not (pid := os.fork()):
            try:
                work(session, BUILD / f"tree{number}", pending[number :: flags.jobs])
                os._exit(0)
            except SystemExit as stop:
                print(stop, flush=True)
                os._exit(1)
        workers.append(pid)
    failed = [os.waitpid(pid, 0)[1] for pid in workers]
    with use_db(str(session)) as db:
        report(db)
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
