"""All code that writes files uses `axial.io.write`, or is reviewed and listed here."""

import ast

from tests.conftest import ROOT

WRITERS = set(
    """
    GFile open open_binary fdopen makedirs mkdir rmtree rename renames copyfile copytree move copyfileobj
    write_file symlink ZipFile TFRecordWriter create_file_writer SummaryManager CheckpointManager savefig save
    savez tofile extractall unpack_archive NamedTemporaryFile os.replace os.link shutil.copy shutil.copy2
    tf.io.gfile.copy tf.profiler.experimental.start
    """.split()
)
# Calls that may write without `axial.io.write`: dict from each reason to a list of (file, function, call).
REVIEWED = {
    "`write_whole` calls it with a temporary file": [
        ("analysis/run_page.py", "draw_curves", "plots.savefig"),
        ("tasks/segmentation/prediction_writers.py", "write", "zipfile.ZipFile"),
        ("data/tfrecord.py", "write", "tf.io.TFRecordWriter"),
        ("training/report.py", "save_picture_table", "figure.savefig"),
        ("tasks/segmentation/drawing.py", "save_stress", "figure.savefig"),
    ],
    "it writes to memory": [
        ("analysis/data_check.py", "_picture", "image.save"),
        ("analysis/view.py", "view_photo", "image.save"),
        ("analysis/run_page.py", "_plotted", "_plots({'': curves}, [name]).savefig"),
        ("data/files.py", "_encoded", "rgb(photo).save"),
        ("data/converters/boxes.py", "_mask", "Image.fromarray(255 * pixels).convert('1').save"),
        ("data/labels.py", "encode_rgb", "Image.fromarray(rgb).save"),
        ("weights/interchange.py", "write_safetensors", "safetensors.numpy.save"),
        ("serving/files.py", "write_lite", "zipfile.ZipFile"),
        ("weights/pytorch.py", "state_dict_bytes", "zipfile.ZipFile"),
    ],
    "it writes to a temporary folder or file of its own": [
        ("weights/checkpoint.py", "_unpack", "open"),
        ("weights/checkpoint.py", "_unpack", "shutil.copyfileobj"),
    ],
    "it writes to the folder of a `new_folder`": [
        ("serving/export.py", "write_saved_model", "tf.saved_model.save"),
        ("serving/export.py", "write_warmup", "tf.io.TFRecordWriter"),
        ("serving/export.py", "write_warmup", "tf.io.gfile.makedirs"),
    ],
    "TensorFlow writes, to a folder of `output_folder` or under a random name": [
        ("cli/evaluate_verbs.py", "writer", "tf.summary.create_file_writer"),
        ("training/monitor.py", "at", "tf.profiler.experimental.start"),
        ("training/trainer.py", "_run", "orbit.utils.SummaryManager"),
    ],
    "TensorFlow writes, where `Saver` has removed the links": [
        ("training/saving.py", "__init__", "tf.train.CheckpointManager"),
        ("training/saving.py", "_write", "self.manager.save"),
    ],
}
# Starts of calls that need no review: axial's functions that write by reviewed code, and os.devnull.
OWN = ("configuration.save", "store.save", "self.saver.save", "saver.save", "super().move", "open(os.devnull")
DOORS = ("io/write.py", "io/lock.py", "io/gfile.py")


def is_writing(node):
    """Returns whether a call may write to the file system. For calls that open a file, the mode decides."""
    called = ast.unparse(node.func)
    name = called.rpartition(".")[2]
    if not {called, name} & WRITERS:
        return False
    if name in ("open", "open_binary", "GFile", "ZipFile", "fdopen") and called != "os.open":
        modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
        return any(not isinstance(m, ast.Constant) or set("wax+") & set(str(m.value)) for m in modes)
    return True


def nodes_in(tree, kind):
    """Returns a list of (node, name of the innermost function around it, or None) for the nodes of a type."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    owner = {id(node): f.name for f in functions for node in ast.walk(f)}  # the innermost function comes last
    return [(node, owner.get(id(node))) for node in ast.walk(tree) if isinstance(node, kind)]


def writers():
    for file in sorted((ROOT / "axial").rglob("*.py")):
        name = file.relative_to(ROOT / "axial").as_posix()
        for node, where in nodes_in(ast.parse(file.read_text()), ast.Call):
            if name not in DOORS and is_writing(node) and not ast.unparse(node).startswith(OWN):
                yield name, where, ast.unparse(node.func)


def test_all_code_that_writes_is_reviewed():
    """New code uses `axial.io.write`, or is reviewed and listed with a reason."""
    actual, reviewed = set(writers()), {call for calls in REVIEWED.values() for call in calls}
    assert sorted(actual - reviewed) == [], "these write without axial.io.write"
    assert sorted(reviewed - actual) == [], "these are no longer there"
