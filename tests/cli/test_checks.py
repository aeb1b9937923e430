"""Errors that commands report without importing TensorFlow: one line and exit code 2."""

import json
import os
import subprocess
import sys

import pytest

from axial.cli import convert as command
from axial.weights import convert

# Reads lines with the JSON of a command's arguments. Runs each command in a fork, and prints its exit code, standard
# output and standard error.
RUN = """
import importlib, json, os, sys, tempfile
sys.modules.update(dict.fromkeys(["tensorflow", "tf_keras", *sys.argv[1].split(",")]))  # makes their import fail
import axial.cli.app, axial.data.files, axial.io.write, axial.recipes  # modules that most commands import
for line in sys.stdin:
    command, *arguments = json.loads(line)
    streams = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if not pid:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        sys.argv = [f"axial-{command}", *arguments]
        importlib.import_module(f"axial.cli.{command}").main()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for stream in streams:
        stream.seek(0)
    print(json.dumps([code, *(stream.read() for stream in streams)]), flush=True)
"""
LEAF = "coco/axial_deeplab_s.gin"
CASES = {
    # axial-train
    "train --model_dir=RUN --gin_file=BROKEN": "broken.gin: not gin's syntax",
    "train --model_dir=RUN --gin_binding=TrainingConfig.stps=1": "did you mean 'steps'",
    "train --model_dir=RUN --gin_binding=TrainingConfig.seed=%SED": "the macro 'SED' is not set",
    "train --model_dir=RUN --gin_binding=MODEL='axial_deeplab_q'": "no model is called 'axial_deeplab_q' (did you mean",
    "train --model_dir=RUN --data_dir=~/.no": f"--data_dir={os.path.expanduser('~')}/.no: no such folder",
    f"train --model_dir=RUN --gin_file={LEAF}": "--data_dir is needed",
    "train --model_dir=RUN --profile=9": "--profile=9: expected the first and the last step",
    "train --model_dir=RUN --data_service=here:1": "--data_service=here:1: expected the address of a dispatcher",
    # axial-evaluate
    "evaluate --model_dir=/nowhere": "/nowhere/config.gin: no such file; a run of axial-train is expected",
    "evaluate --model_dir=nuclei --gin_binding=BATH=1": "the macro 'BATH' is not used anywhere (did you mean",
    "evaluate --model=nuclei --csv=FILE/scores.csv": "scores.csv: cannot be written",
    "evaluate --model=hf://a/b": "hf://a/b: needs ",
    "evaluate --model=FOLDER": "folder: this folder is none of a run of axial-train, ",
    "evaluate --model=nuclei --data_dir=FOLDER --split=val": "folder: no split 'val', the folder has no",
    "evaluate --model_dir=RUN --submission_dir=OUT --cityscapes_dir=FOLDER": "Cityscapes' own scores need ",
    # axial-export
    "export --model_dir=nuclei --output_dir=OUT --checkpoint=/nowhere": "/nowhere: no such checkpoint",
    "export --model_dir=nuclei --output_dir=FOLDER": "exists; it is never overwritten",
    "export --model_dir=nuclei --output_dir=OUT --format=onnx": "ONNX needs ",
    "export --model_dir=nuclei --output_dir=OUT --format=tflite --precision=int8": "--precision=int8 needs --maps: ",
    # axial-predict
    r"predict --model=nuclei --output_dir=OUT a\b.jpg": r"a\b.jpg: no such photo (a backslash separates no",
    "predict --model=nuclei --output_dir=FILE FILE": "a file; expected a folder",
    "predict --model=nuclei --output_dir=OUT --table=FILE/cells.csv PHOTO": "cells.csv: cannot be written",
    "predict --model=nuclei --output_dir=OUT --table=PHOTO PHOTO": "photo.bmp: its name must end in .csv",
    "predict --model=nuclei --output_dir=OUT --pixel_size=0.65um PHOTO": "--pixel_size needs --table",
    "predict --model=nuclei --table=OUT.csv --pixel_size=0.65px PHOTO": "--pixel_size=0.65px: expected the side of a",
    "predict --model=nuclei --table=OUT.csv --text=Two": "--text does not go with --table",
    # axial-convert
    "convert folder --input_dir=FOLDER --spec=/nowhere.yaml --output_dir=OUT --split=train": "/nowhere.yaml: no such",
    "convert mapillary --input_dir=FOLDER --output_dir=OUT --split=training --version=v3": "expected one of v1.2, v2.0",
    "convert multi30k --input_dir=FOLDER --output_dir=OUT --split=train --languages=en": "--languages=en: expected two",
    "convert weights --source=deeplab2 --input=FILE --output=OUT --model=resnet50": "did you mean 'resnet_50'",
    # axial-analyze
    "analyze recipes coco/axial_deeplab_x.gin": "no such gin file (did you mean",
    "analyze attention --checkpoint=/nowhere --image=PHOTO --output_dir=OUT --query=9,9": "outside of the photo of 2x2",
    "analyze curves study --figure=FILE": "must end in .png or",
    "analyze input --gin_file=coco/axial_deeplab_x.gin": "no such gin file (did you mean",
    # axial-data-service
    "data_service worker --dispatcher=here": "--dispatcher=here: expected the address of a dispatcher",
    # axial-tpu
    "tpu launch --engine=gke --slice=v5e-8 --name=a --runtime=x --time_limit=1 --gin_file=coco/axial_deeplab_x.gin "
    "--data_dir=gs://b/d --model_dir=gs://b/r": "no such gin file (did you mean",
}
MISSING = "tf2onnx,huggingface_hub,cityscapesscripts"


@pytest.fixture(scope="module")
def without_tensorflow():
    """A function that runs a command in a process where TensorFlow and `MISSING` cannot be imported.

    It returns [exit code, standard output, standard error].
    """
    with subprocess.Popen(
        [sys.executable, "-c", RUN, MISSING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(call):
            server.stdin.write(json.dumps(call.split()) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


@pytest.mark.parametrize("call,words", CASES.items(), ids=CASES)
def test_cheap_errors_come_before_tensorflow(without_tensorflow, tmp_path, call, words):
    given = tmp_path / "given"
    (given / "folder").mkdir(parents=True)
    (given / "file").write_text("")
    (given / "broken.gin").write_text("STEPS 1\n")
    (given / "photo.bmp").write_bytes(BMP)
    places = {"RUN": tmp_path / "run", "OUT": tmp_path / "out"}
    places |= {name.upper(): given / name for name in ("folder", "file")}
    places |= {"BROKEN": given / "broken.gin", "PHOTO": given / "photo.bmp"}
    for name, path in places.items():
        call = call.replace(f"={name}", f"={path}").replace(f" {name}", f" {path}")
    code, out, err = without_tensorflow(call)
    assert code == 2, err
    (line,) = err.splitlines()
    assert words in line and not out
    assert os.listdir(tmp_path) == ["given"]


def test_the_sources_of_weights_are_those_of_the_module():
    assert tuple(convert.SOURCES) == command.SOURCES and tuple(convert.TARGETS) == command.TARGETS


# A white BMP of 2x2 pixels: two headers, and two rows of three bytes per pixel and two bytes of padding.
BMP = b"BM" + (70).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
BMP += b"".join(number.to_bytes(4, "little") for number in (40, 2, 2, 1 + (24 << 16), 0, 16, 0, 0, 0, 0))
BMP += 2 * (6 * b"\xff" + bytes(2))
