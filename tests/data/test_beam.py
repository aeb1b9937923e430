"""A Beam pipeline writes the files of a local conversion, byte for byte."""

import functools
import pathlib
import shutil

import pytest

pytest.importorskip("apache_beam", reason="needs apache-beam (pip install '.[beam]'), which is no part of .[dev]")

from axial.data import beam
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import COCO
from axial.errors import InputError
from tests.data import conversion


def files(folder):
    """Returns a dict from the name of each file in a folder to its bytes, without names that begin with a dot."""
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if path.name[0] != "."}


def convert(folder, write=None, input_dir=SAMPLE_DIR, shards=3, **options):
    listed = coco_items(str(input_dir), "train2017")
    return conversion.convert(listed, COCO, folder, "train2017", shards=shards, write=write, **options)


def by_beam(input_dir=SAMPLE_DIR, runner="DirectRunner"):
    """Returns a value of the argument `write` that converts by a Beam pipeline."""
    listing = functools.partial(coco_items, str(input_dir), "train2017")
    return beam.shard_writer(listing, beam.make_options(runner, ()))


def test_the_files_are_those_of_a_local_conversion(tmp_path):
    """The files are also equal if one way of conversion replaces a missing shard that the other way wrote."""
    manifest, _ = convert(tmp_path / "local")
    other, done = convert(tmp_path / "beam", by_beam())
    assert files(tmp_path / "beam") == files(tmp_path / "local") and len(manifest["shards"]) == 3
    assert other == manifest and done["photos"] == 8 and done["stages"]["decode the photo"] > 0
    assert not [path.name for path in (tmp_path / "beam").iterdir() if path.name[0] == "."]
    for folder, write in ((tmp_path / "beam", None), (tmp_path / "local", by_beam())):
        (folder / "train2017-00001-of-00003.tfrecord").unlink()
        assert convert(folder, write)[1]["photos"] == 3
    assert files(tmp_path / "beam") == files(tmp_path / "local")


def test_broken_photos_are_left_out_and_named_as_in_a_local_conversion(tmp_path):
    source = shutil.copytree(SAMPLE_DIR, tmp_path / "sample")
    for path in sorted((source / "train2017").iterdir())[2:5]:
        path.write_bytes(path.read_bytes()[:-1000])
    messages = []
    for name, write in (("local", None), ("beam", by_beam(source))):
        with pytest.raises(InputError, match="^3 of 8 photos are broken") as error:
            convert(tmp_path / name, write, source)
        messages.append(str(error.value).replace(str(tmp_path / name), ""))
        manifest, _ = convert(tmp_path / name, write, source, skip_broken=True)
        assert manifest["examples"] == 5 and len(manifest["left_out"]) == 3
    assert files(tmp_path / "beam") == files(tmp_path / "local") and messages[0] == messages[1]


def test_the_command_converts_sentences(command, tmp_path, texts_dir):
    texts = pathlib.Path(texts_dir).parent / "texts"
    options = [f"--input_dir={texts}", "--split=train", "--split=val", "--vocabulary_size=64"]
    flags = ["--beam", "--runner=DirectRunner", "--beam_option=direct_num_workers=1"]
    for way, arguments in (("local", []), ("beam", flags)):
        done = command("convert", "multi30k", *options, f"--output_dir={tmp_path}/{way}", *arguments)
        assert done.code == 0, done.err
    assert files(tmp_path / "beam") == files(tmp_path / "local")


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(InputError, match="--beam_option=jobname=x: Beam has no option 'jobname'.*job_name"):
        beam.make_options("DirectRunner", ["job_name=fine", "jobname=x"])
    with pytest.raises(InputError, match="--beam_option: argument --direct_num_workers: invalid int value: 'two'"):
        beam.make_options("DirectRunner", ["direct_num_workers=two"])
    with pytest.raises(InputError, match="--runner=NoRunner: "):
        convert(tmp_path / "runner", by_beam(runner="NoRunner"))
    items, _ = coco_items(SAMPLE_DIR, "train2017")
    write = beam.shard_writer(lambda: (items, b"other"), beam.make_options("DirectRunner", []))
    with pytest.raises(InputError, match="lists other items than the machine that started the job"):
        convert(tmp_path / "other", write)
    assert not list((tmp_path / "other").glob("*.tfrecord"))
