"""No name from outside leads out of its folder, and all code that builds a path from data is reviewed."""

import ast
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axial.errors import InputError
from axial.io.paths import LONGEST, inside, output_names
from tests.conftest import ROOT
from tests.io.test_writers import nodes_in

RIGHT = (
    *("a.png", "aachen/aachen_000.png", "...", "..a", "a..", ".hidden", " a b ", "~", "-a", "C:", "été/写真 1.jpg"),
    *("x" * LONGEST, "é" * (LONGEST // 2), "a\\b.jpg", "a\u00a0b", "*", "[x]", "$HOME", "a:b"),
)
WRONG = (
    *("", ".", "..", "../a", "a/..", "a/../b", "a/../../b", "/a", "/", "//a", "a//b", "a/", "./a", "a/./b", "a/."),
    *("..\\a", "a\\..\\..\\b", "\\a", "\\\\host\\a", "\x00", "a\x00.png", "a\nb", "\x1b[2J", "a\x7f", "\x9b", "a\t"),
    *("x" * (LONGEST + 1), "é" * LONGEST, "a/" + "x" * 300, "\ud800", "a\udcff"),
)


def test_right_names_stay_as_they_are():
    for name in RIGHT:
        assert inside("folder", name, "a record") == f"folder/{name}"
        assert inside("gs://bucket/folder", name, "a record") == f"gs://bucket/folder/{name}"


def test_wrong_names_are_named():
    said = {"": "has an empty part", "/a": "leaves", "\\a": "leaves", "..": "leaves"}
    for name in WRONG:
        with pytest.raises(InputError, match=f"^a record: .*{said.get(name, '')}") as error:
            inside("folder", name, "a record")
        assert len(str(error.value)) < 1000 and str(error.value).isprintable(), name


@given(st.text(st.sampled_from("./\\ab\x00é") | st.characters(), max_size=20))
def test_a_path_is_below_its_folder_or_there_is_none(name):
    try:
        path = inside("/folder", name, "a record")
    except InputError:
        return
    for separated in (path, path.replace("\\", "/")):
        assert os.path.normpath(separated) == separated and separated.startswith("/folder/")
    assert not any(unicodedata.category(letter) == "Cc" for letter in path)


# === All code that builds a path ===

# Functions whose first argument is a path, named without their modules.
TAKE_A_PATH = set(
    """open GFile gzip exists isdir isfile listdir scandir walk glob remove unlink rename replace copy stat lstat
    makedirs mkdir rmtree file_digest folder_digests read_file read_text read_json read_yaml read_record
    write_whole write_bytes write_text write_json write_image write_file new_folder make_folder
    remove_folder output_folder output_file locked savefig TFRecordWriter TFRecordDataset
    create_file_writer CheckpointManager Saver NewCheckpointReader checkpoints_iterator""".split()
)
# Parts of paths that need not go through `inside`: dict from each reason to a list of (file, function, *expressions).
REVIEWED = {
    "the folder itself lists the name": [
        ("data/files.py", "find_photos", "name"),
        ("data/files.py", "folders_in", "name"),
        ("data/converters/cityscapes.py", "_frames", "city", "name"),
        ("data/converters/instances.py", "_list_labelme", "name"),
        ("data/files.py", "_is_predicted", "f'{stem}.json'"),
        ("data/files.py", "by_name", "name"),
        ("data/files.py", "split_folder", "split"),
        ("data/converters/imagenet.py", "_classes", "name", "split"),
        ("data/converters/imagenet.py", "imagenet_items", "name", "photo"),
        ("data/converters/nuclei.py", "_folders", "f'{split}.txt'", "name"),
        ("io/write.py", "_files", "name"),
        ("io/write.py", "folder_digests", "name"),
        ("io/write.py", "new_folder", "name"),
        ("io/write.py", "refuse_links", "name"),
        ("weights/checkpoint.py", "_find", "prefixes[0]"),
        ("weights/checkpoint.py", "_tensors", "shard"),
        ("weights/checkpoint.py", "remove_unfinished", "f'{name}{UNFINISHED}'", "name", "shard"),
    ],
    "the code fixes the name, or chooses between fixed names": [
        ("analysis/view.py", "write_view", "f'view.{kind}'"),
        ("cli/tpu.py", "_launch", "engine.file"),
        ("cli/export_files.py", "_write_safetensors", "name"),
        ("cloud/engines.py", "_script", "name"),
        ("io/page.py", "_file", "name"),
        ("recipes/__init__.py", "read_recipe", "path"),
        ("recipes/settings.py", "_module", "*name.split('.')[1:]"),
        ("data/converters/cityscapes.py", "cityscapes_items", "labels"),
        ("data/converters/folder.py", "folder_items", "name or kind"),
        ("data/converters/instances.py", "_listed", "name"),
        ("data/converters/mapillary.py", "mapillary_items", "f'panoptic_{year}.json'", "version"),
        ("data/convert.py", "convert_sample", "name"),
        ("data/converters/mapillary.py", "mapillary_spec", "n", "names[0]"),
        ("tasks/segmentation/cityscapes_scores.py", "_truth", "f'*_{kind}.png'"),
        ("training/saving.py", "_write", "f'ckpt-{step}'"),
        ("training/saving.py", "save", "f'ckpt-{step}'"),
        ("training/evaluating.py", "_scores", "f'ckpt-{step}.index'"),
        ("weights/checkpoint.py", "run_checkpoints", "f'ckpt-{step}'"),
        ("weights/source.py", "_export", "name"),
        ("weights/source.py", "_weights", "name"),
        ("weights/source.py", "shipped_folder", "what"),
    ],
    "the last part of a path that the user gives": [
        ("cli/analyze.py", "_attention", "os.path.splitext(os.path.basename(given.image))[0]"),
        ("cli/predict.py", "finish", "names[photo]"),
    ],
    "the last part of a path that a list of checkpoints has": [],
    "it is only read, and a gin file may include any other": [("recipes/__init__.py", "find_file", "below")],
    "the path is only shown": [
        ("data/files.py", "check_paired", "odd + ending"),
        ("data/files.py", "names_in", "os.fsdecode(error.object)"),
        ("data/converters/imagenet.py", "_listed", "split"),
        ("serving/predictor.py", "check_export", "name"),
    ],
    "it makes these paths, of names that it or its caller has checked": [
        ("data/files.py", "names_below", "below"),
        ("io/lock.py", "locked", "name"),
        ("io/paths.py", "inside", "name"),
        ("io/gfile.py", "glob", "pattern"),
        ("io/write.py", "output_file", "os.path.basename(name)"),
        ("io/write.py", "partial_path", "partial"),
        ("io/write.py", "write_whole", "os.path.basename(path)"),
        ("weights/checkpoint.py", "_unpack", "name"),
    ],
}


def is_fixed(node):
    """Returns whether an expression in a path is a constant or a number, which no text from a file can change."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, (ast.Name, ast.Attribute)):
        return getattr(node, "id", getattr(node, "attr", "")).lstrip("_").isupper()
    if isinstance(node, ast.JoinedStr):
        return all(map(is_fixed, node.values))
    if isinstance(node, ast.FormattedValue):
        is_number = node.format_spec and ast.unparse(node.format_spec).rstrip("'\"").endswith("d")
        return bool(is_number) or is_fixed(node.value)
    if isinstance(node, ast.BinOp):
        return is_fixed(node.left) and is_fixed(node.right)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "tempfile.gettempdir")


def parts_behind(path):
    """Returns the parts of a path expression after the first part, which is itself a path."""
    if isinstance(path, ast.JoinedStr):
        starts = isinstance(path.values[0], ast.FormattedValue)
        return path.values[1:] if starts else path.values
    if isinstance(path, ast.BinOp):
        return [*parts_behind(path.left), path.right]
    return []


def path_parts():
    """Yields (file, function, expression) for each part of a path in axial that the code does not fix."""
    for file in sorted((ROOT / "axial").rglob("*.py")):
        yield from path_parts_in(file.relative_to(ROOT / "axial").as_posix(), file.read_text())


def path_parts_in(file, source):
    tree = ast.parse(source)
    assigned = {  # keys: (function, name) of a variable, (False, text) of an attribute
        (isinstance(target, ast.Name) and where, ast.unparse(target)): node.value
        for node, where in nodes_in(tree, ast.Assign)
        for target in node.targets
    }
    for node, where in nodes_in(tree, ast.Call):
        called, parts = ast.unparse(node.func), []
        if not node.args:
            continue
        if called == "os.path.join":
            parts = node.args[1:]
        elif called == "inside" or called.rpartition(".")[2] in TAKE_A_PATH:
            path = node.args[0]
            name = isinstance(path, ast.Name) and where, ast.unparse(path)
            parts = parts_behind(assigned.get(name, path))
        yield from ((file, where, ast.unparse(expression)) for expression in parts if not is_fixed(expression))


def test_all_code_that_builds_a_path_from_data_is_reviewed():
    """New code calls `inside`, or a function that calls it, or is reviewed and listed with a reason."""
    actual, listed = set(path_parts()), [row for rows in REVIEWED.values() for row in rows]
    reviewed = {(file, function, expression) for file, function, *parts in listed for expression in parts}
    assert sorted(actual - reviewed) == [], "these parts of paths come from data: see axial.io.paths"
    assert sorted(reviewed - actual) == [], "these are no longer there"


# === Names of outputs ===

NAMES = st.lists(st.text("a1-.", min_size=1, max_size=5), min_size=1, max_size=8)


@given(NAMES)
def test_no_two_outputs_have_one_name(names):
    """Outputs have different names. The output of a photo with a unique stem has this stem as its name."""
    stems = [os.path.splitext(name)[0] for name in names]
    outputs = output_names(stems, names)
    assert len(set(outputs)) == len(names)
    for stem, name in zip(stems, outputs):
        assert stems.count(stem) > 1 or name == stem


def test_a_number_makes_a_name_unique():
    """The number is the position of the photo, or the next one in steps of the number of photos."""
    assert output_names(["a", "a", "1-a", "b"]) == ["5-a", "2-a", "1-a", "b"]
    assert output_names(["a", "a", "1-a", "5-a"]) == ["9-a", "2-a", "1-a", "5-a"]
