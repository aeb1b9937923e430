"""A command that reads a mutated file gives the right result, or prints one line and exits with code 2.

scripts/test.sh tests/faults                      a few mutations
scripts/test.sh -n 0 -m slow tests/faults         2,275 mutations; AXIAL_SEED chooses others, rounds.py records them

Mutations change random bytes, replace files by links or pipes, and convert images to other formats. In JSON, YAML and
records, they also change single fields to values around the limits of the schema. Photo names in records become paths
outside the folder. The commands may write and remove files only in their output folders.
"""

import copy
import dataclasses
import functools
import json
import math
import os
import random
import re
import shutil
import typing
import warnings
import zlib

import msgspec
import pytest
import tensorflow as tf
import yaml
from PIL import Image

from axial.data import specs, tfrecord
from axial.io import schemas
from axial.training.split_run import EvaluationState
from tests.data.coco_fixture import CocoFolder, stripes
from tests.data.record_fixture import CHANGES, change_record, values_of
from tests.faults import rounds
from tests.hostile import NAMES
from tests.io.image_fixture import FORMATS

SEED = os.environ.get("AXIAL_SEED", "0")
SECONDS, GIBIBYTES = 30, 4  # limits of a command's time and memory


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of files to mutate.

    Attributes:
        files: glob pattern of the files, relative to the folder of `material`.
        call: the command line that reads the files.
        rounds: number of mutations.
        schema: msgspec type of the files' content; None for files without fields.
        free: whether a mutation may change the result, because the format has no checksum that detects it.
        change: function of a random generator and a path, which changes the file and returns a description; None for
            `change_bytes`.
    """

    files: str
    call: str
    rounds: int
    schema: type | None = None
    free: bool = False
    change: typing.Callable | None = None


EXPORT = "evaluate --saved_model={root}/export --data_dir={root}/data --split=val --json={root}/result"
RUN = EXPORT.replace("--saved_model={root}/export", "--model_dir={root}/run")
PHOTOS = "predict --saved_model={root}/export --output_dir={root}/out {root}/photos"
COCO = "convert coco --input_dir={root}/coco --output_dir={root}/out --split=val"
FOLDER = COCO.replace("coco", "folder") + " --spec={root}/folder/classes.yaml"
RESULTS = (
    "evaluate results --results_json={root}/results/panoptic_val.json --results_dir={root}/results/panoptic_val "
    "--data_dir={root}/data --split=val --json={root}/result"
)
CHECK = "convert check --data_dir={root}/data --split=val --html={root}/out/check.html"
STATE = EXPORT + " --results_dir={root}/results"
REPORT = EXPORT + " --results_dir={root}/out/results --report={root}/out/report"


def words(call, root):
    return call.format(root=root).split()


PATHS = (
    *("../x.jpg", "../../../x.jpg", "/x.jpg", "..", ".", "", "a/../../../x.jpg", "..\\..\\x.jpg", "a/b.jpg", "~"),
    *("a\x00.jpg", "a\nb.jpg", "\x1b[2J.jpg", "é" * 300, "a/" * 2000, "panoptic_val2017.json", "<b>.jpg", "=1.jpg"),
    b"\xff.jpg",
)


def change_name(rng, path):
    """Gives the photo of a random record a hostile name. Shard and manifest stay valid."""
    name = rng.choice(PATHS)
    name = name if isinstance(name, bytes) else name.encode()
    records = len(list(tf.data.TFRecordDataset(str(path))))
    change_record(
        path, rng.randrange(records), "image/file_name", lambda e, key: values_of(e, key).__setitem__(0, name)
    )
    return f"name {name[:100]!r}"


@pytest.fixture(scope="session")
def converted(command, tmp_path_factory):
    """A folder with a data set in COCO's format, a data set of label images, and the records of the first one."""
    root = tmp_path_factory.mktemp("converted")
    coco = CocoFolder(root / "coco")
    coco.add(1, stripes(40, 60, [0, 3, 300]), {3: 1, 300: 187})
    coco.add(2, stripes(30, 20, [7, 9]), {7: 1, 9: 193}, crowd=(7,))
    coco.content["categories"] = [{"id": 1, "name": "person", "isthing": 1}]
    coco.write()
    assert command(*words(COCO, root)).code == 0
    (root / "out").rename(root / "data")
    folder = root / "folder" / "val"
    for layer in ("semantic", "instance", "photos"):
        (folder / layer).mkdir(parents=True)
    ids, number = stripes(20, 30, [1, 2]), stripes(20, 30, [1, 0])
    for layer, pixels in (("semantic", ids), ("instance", number), ("photos", ids * 99)):
        Image.fromarray(pixels.astype("uint8")).save(folder / layer / "one.png")
    classes = [{"id": 1, "name": "car", "thing": True, "color": [1, 2, 3]}, {"id": 2, "name": "road"}]
    spec = {"name": "mine", "classes": classes, "ignored_ids": [0], "label_divisor": 1000, "ignore": 255}
    (root / "folder" / "classes.yaml").write_text(yaml.safe_dump(spec))
    return root


@pytest.fixture(scope="session")
def material(command, converted, whole, tmp_path_factory):
    """A folder with the unchanged files of every `Kind`."""
    root = shutil.copytree(converted, tmp_path_factory.mktemp("material") / "root")
    for name in ("run", "export", "photos"):
        shutil.copytree(whole / name, root / name)
    assert command(*words(STATE, root)).code == 0
    (root / "result").unlink()
    return root


@pytest.fixture(scope="session")
def right(command, material):
    """A function that returns the result of a command on the unchanged files."""
    results = {}

    def find(call):
        if call not in results:
            done = command(*words(call, material))
            assert done.code == 0, done.err
            results[call] = take_result(material)
        return results[call]

    return find


def take_result(root):
    """Returns the result of a command, and removes the command's output."""
    path, folder = root / "result", root / "out"
    result = json.loads(path.read_text()) if path.exists() else None
    path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return result


# === Changes ===


def flipped(rng, data, count=1):
    for _ in range(count):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def spliced(rng, data, inside=None):
    """Returns the data with a random slice moved to the end, or with 64 bytes replaced by `inside`."""
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + data[b:] + data[a:b] if inside is None else data[:a] + inside + data[a + 64 :]


BYTES = {
    "flip": flipped,
    "flips": lambda rng, data: flipped(rng, data, 20),
    "cut": lambda rng, data: data[: rng.randrange(len(data))],
    "empty": lambda rng, data: b"",
    "zeros": lambda rng, data: spliced(rng, data, bytes(64)),
    "insert": lambda rng, data: spliced(rng, data, rng.randbytes(72)),
    "swap": spliced,
}


def change_bytes(rng, path):
    """Changes random bytes of a file, deletes it, or replaces it by a link. Returns the kind of the change."""
    kind = rng.choice([*BYTES, "delete", "link"])
    if kind == "delete":
        path.unlink()
    elif kind == "link":
        kept = path.rename(path.with_name(f"{path.name}.kept"))
        path.symlink_to(rng.choice([kept.name, path.name, "nothing", "."]))
    elif data := bytearray(path.read_bytes()):
        path.write_bytes(BYTES[kind](rng, data))
    return kind


def change_record_field(rng, path):
    """Changes a random field of a random record. Shard and manifest stay valid. Returns a description."""
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    number, change = rng.randrange(len(records)), rng.choice(CHANGES)
    features = tf.train.Example.FromString(records[number]).features.feature
    field = rng.choice(sorted(key for key, feature in features.items() if feature.ListFields()[0][1].value))
    change_record(path, number, field, change)
    return f"{change.__name__} {field} of record {number}"


def change_format(rng, path):
    """Writes an image in another format to the same path, and sometimes truncates the file. Returns the format."""
    formats = [*FORMATS, "EPS", "PDF", "ICO", "JPEG2000", "PPM", "TGA", "AVIF", "DDS", "PCX", "SGI", "IM", "QOI"]
    with Image.open(path) as image:
        format, image = rng.choice(sorted({*formats} & {*Image.SAVE})), image.convert("RGB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        image.save(path, format)
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
    return format


def change_to_pipe(_, path):
    path.unlink()
    os.mkfifo(path)
    return "pipe"


def limits(schema):
    """Returns the sorted numbers at, below and above the limits in a schema and in its nested structs."""
    bounds, queue, visited = set(), [schema], set()
    while queue:
        kind = queue.pop()
        for constraint in getattr(kind, "__metadata__", ()):
            bounds |= {constraint.ge, constraint.le, constraint.gt, constraint.lt} - {None}
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in visited:
            visited.add(kind)
            queue += typing.get_type_hints(kind, include_extras=True).values()
        queue += typing.get_args(kind)
    return sorted({limit + step for limit in bounds for step in (-1, 0, 1)})


def fields(value, path=()):
    """Yields the paths of all fields and items in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield (*path, key)
        yield from fields(child, (*path, key))


DEEP = "<deep>"  # placeholder for 3,000 nested lists, which Python's JSON and YAML writers cannot write
WRONG = (
    DEEP,
    *(None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, 2**70, 10**400, math.nan, math.inf, -math.inf, "", "x", "../x"),
    *("1", "\x00", "é" * 300, [], {}, [[]], [1, "a"], {"a": 1}, "../../../x", "/x", "..", "..\\x", "a\nb"),
    *NAMES,
)


def change_field(rng, path, schema):
    """Deletes, renames, duplicates or swaps a random field of a document, or sets it to a wrong value."""
    document = yaml.safe_load(path.read_text())  # YAML readers read JSON
    every = sorted(fields(document), key=str)
    # Draws a name first, so that rare names are as likely as common ones.
    name = rng.choice(sorted({field[-1] for field in every}, key=str))
    *parents, last = rng.choice([field for field in every if field[-1] == name])
    parent = functools.reduce(lambda node, key: node[key], parents, document)
    what = rng.choice(["delete", "rename", "double", "exchange", "value", "value", "value", "limit"])
    if what == "delete":
        del parent[last]
    elif what == "rename" and isinstance(parent, dict):
        parent[f"{last}x"] = parent.pop(last)
    elif what == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    elif what == "exchange":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[last], parent[other] = parent[other], parent[last]
    else:
        parent[last] = rng.choice(limits(schema) if what == "limit" else [*WRONG, rng.randrange(-(2**40), 2**40)])
    deep = "[" * 3000 + "]" * 3000
    text = yaml.safe_dump(document) if path.suffix == ".yaml" else json.dumps(document).replace(f'"{DEEP}"', deep)
    path.write_text(text.replace(DEEP, deep), encoding="utf-8", errors="surrogatepass")
    return f"{what} {name} of {json.dumps(document)[:2000]}"


# === The kinds ===

KINDS = {
    "manifest": Kind("data/val.json", EXPORT, 100, tfrecord.Manifest),
    "manifest to check": Kind("data/val.json", CHECK, 50, tfrecord.Manifest, free=True),
    "records": Kind("data/*.tfrecord", EXPORT, 150),
    "names in records": Kind("data/*.tfrecord", REPORT, 50, free=True, change=change_name),
    "run's spec": Kind("run/spec.json", RUN, 100, specs.StoredSpec, free=True),
    "run's configuration": Kind("run/config.gin", RUN, 100, free=True),
    "list of checkpoints": Kind("run/checkpoint", RUN, 50, free=True),
    "checkpoint": Kind("run/ckpt-*", RUN, 150),
    "export": Kind("export/**/*", EXPORT, 200),
    "photo": Kind("photos/*", PHOTOS, 150, free=True),
    "COCO's JSON": Kind("coco/annotations/*.json", COCO, 300, schemas.Panoptic, free=True),
    "label image": Kind("coco/annotations/panoptic_val/*", COCO, 100, free=True),
    "photo to convert": Kind("coco/val/*", COCO, 100, free=True),
    "YAML of classes": Kind("folder/*.yaml", FOLDER, 200, specs.SpecFile, free=True),
    "results": Kind("results/panoptic_val.json", RESULTS, 100, schemas.Results, free=True),
    "record's field": Kind("data/*.tfrecord", EXPORT, 60, free=True, change=change_record_field),
    "field of a record to check": Kind("data/*.tfrecord", CHECK, 40, free=True, change=change_record_field),
    "format of a photo": Kind("photos/*", PHOTOS, 40, free=True, change=change_format),
    "format of a photo to convert": Kind("coco/val/*", COCO, 30, free=True, change=change_format),
    "format of a label image": Kind("coco/annotations/panoptic_val/*", COCO, 30, free=True, change=change_format),
    "pipe for a photo": Kind("photos/*", PHOTOS, 10, change=change_to_pipe),
    "pipe in a data set": Kind("coco/**/*.*", COCO, 20, change=change_to_pipe),
    "pipe in records": Kind("data/*", EXPORT, 10, change=change_to_pipe),
    "pipe in an export": Kind("export/**/*", EXPORT, 20, change=change_to_pipe),
    "pipe for a YAML of classes": Kind("folder/*.yaml", FOLDER, 5, change=change_to_pipe),
    "pipe for results": Kind("results/**/*.*", RESULTS, 10, change=change_to_pipe),
    "state of an evaluation": Kind("results/.val.*.json", STATE, 100, EvaluationState, free=True),
}
assert sum(kind.rounds for kind in KINDS.values()) == 2275


# === The rounds ===


def check(command, material, right, *, tmp_path, kind, change):
    """Plays one round: copies the files, changes one, and runs the command. Returns its exit code.

    `change` is a function of the copy's folder that returns (path of the changed file, description).
    """
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(material, root)
    path, done = change(root)
    before, around = zlib.crc32((material / path.relative_to(root)).read_bytes()), listing(tmp_path)
    result = command(*words(kind.call, root))
    what = f"{done} of {path.relative_to(root)}: exit code {result.code}\n{result.err[-2000:]}"
    assert "Traceback" not in result.err, what
    assert not re.search("[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", result.out + result.err), what
    assert listing(tmp_path) == around, what
    assert result.code in (0, 2) and result.seconds < SECONDS and result.peak < GIBIBYTES, what
    if result.code == 2:
        assert result.line, what
    elif not kind.free and path.is_file() and zlib.crc32(path.read_bytes()) != before:
        assert take_result(root) == right(kind.call), what
    return result.code


def listing(folder):
    """Returns a dict from paths below a folder to sizes and times of files. It skips the outputs of commands."""
    written = [folder / "copy" / name for name in ("out", "result", "results")]
    kept = [path for path in folder.rglob("*") if not any(map(path.is_relative_to, written))]
    statuses = {path: path.lstat() for path in kept}
    return {path: path.is_dir() or (s.st_size, s.st_mtime_ns, s.st_ino) for path, s in statuses.items()}


def run(command, material, right, *, tmp_path, name, count):
    """Plays `count` rounds of a kind. If its files have a schema, every second round changes a field."""
    kind = KINDS[name]
    for number in range(count):
        if rounds.done("mutations", name, number):
            continue
        rng = random.Random(f"{SEED} {name} {number}")

        def change(root, rng=rng, fields=kind.schema and number % 2):
            path = rng.choice(sorted(path for path in root.glob(kind.files) if path.is_file()))
            if fields:
                return path, change_field(rng, path, kind.schema)
            return path, (kind.change or change_bytes)(rng, path)

        code = check(command, material, right, tmp_path=tmp_path, kind=kind, change=change)
        rounds.end("mutations", name, number, code)


# The other kinds need a run and an export, which take half a minute. Quick tests in other folders damage these files.
QUICK = "COCO's JSON", "field of a record to check"


@pytest.mark.parametrize("name", QUICK)
def test_mutations(command, converted, tmp_path, name):
    run(command, converted, None, tmp_path=tmp_path, name=name, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_mutations(command, material, right, tmp_path, name):
    run(command, material, right, tmp_path=tmp_path, name=name, count=KINDS[name].rounds)
