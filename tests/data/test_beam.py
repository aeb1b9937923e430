"""A Beam pipeline writes the files of a local conversion, byte for byte."""

import functools
import pathlib
import shutil

import pytest

pytest.importorskip("apache_beam", reason="needs apache-beam (pip install '.[beam]'), which is no part of .[dev]")

from axial.data import beam
from axial.data.convert import convert_split, encode_item
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import COCO
from axial.errors import InputError


def files(folder):
    """dict from the names in a folder to their bytes, without those that begin with a dot."""
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if path.name[0] != "."}


def convert(folder, write=None):
    items, source = coco_items(SAMPLE_DIR, "train2017")
    options = dict(output_dir=str(folder), source=source, shards=3, progress=False, write=write)
    return convert_split(items, encode_item, COCO, "train2017", **options)


def by_beam(input_dir=SAMPLE_DIR, *options):
    """The argument `write` of a pipeline."""
    listing = functools.partial(coco_items, str(input_dir), "train2017")
    return beam.shard_writer(listing, encode_item, beam.make_options("DirectRunner", options))


def test_the_files_are_those_of_a_local_conversion(tmp_path):
    manifest, _ = convert(tmp_path / "local")
    other, done = convert(tmp_path / "beam", by_beam())
    assert files(tmp_path / "beam") == files(tmp_path / "local") and len(manifest["shards"]) == 3
    assert other == manifest and done["photos"] == 8 and done["stages"]["decode the photo"] > 0
    assert not [path.name for path in (tmp_path / "beam").iterdir() if path.name[0] == "."]


def test_a_stopped_pipeline_is_resumed(tmp_path):
    """Whole shards are kept. One that is missing is written again, by whichever of the two ways."""
    convert(tmp_path / "local")
    for writes in ((by_beam(), None), (None, by_beam())):
        folder = tmp_path / str(bool(writes[0]))
        convert(folder, writes[0])
        (folder / "train2017-00001-of-00003.tfrecord").unlink()
        assert convert(folder, writes[1])[1]["photos"] == 3
        assert files(folder) == files(tmp_path / "local")


def test_broken_photos_are_left_out_and_named_as_in_a_local_conversion(tmp_path):
    source = shutil.copytree(SAMPLE_DIR, tmp_path / "sample")
    for path in sorted((source / "train2017").iterdir())[2:5]:
        path.write_bytes(path.read_bytes()[:-1000])
    messages = []
    for name, write in (("local", None), ("beam", by_beam(source))):
        items, digest = coco_items(str(source), "train2017")
        options = dict(output_dir=str(tmp_path / name), source=digest, shards=3, progress=False, write=write)
        with pytest.raises(InputError, match="^3 of 8 photos are broken") as error:
            convert_split(items, encode_item, COCO, "train2017", **options)
        messages.append(str(error.value).replace(str(tmp_path / name), ""))
        manifest, _ = convert_split(items, encode_item, COCO, "train2017", **options, skip_broken=True)
        assert manifest["examples"] == 5 and len(manifest["left_out"]) == 3
    assert files(tmp_path / "beam") == files(tmp_path / "local") and messages[0] == messages[1]


def test_the_command_converts_photos_and_sentences(command, tmp_path, texts_dir):
    texts = pathlib.Path(texts_dir).parent / "texts"
    for name, options in (
        ("coco", ["--shards=2"]),
        ("multi30k", [f"--input_dir={texts}", "--split=train", "--split=val", "--vocabulary_size=64"]),
    ):
        local, piped = (f"--output_dir={tmp_path}/{name}/{way}" for way in ("local", "beam"))
        for arguments in ([local], [piped, "--beam", "--runner=DirectRunner", "--beam_option=direct_num_workers=1"]):
            done = command("convert", name, *options, *arguments)
            assert done.code == 0, done.err
        assert files(tmp_path / name / "beam") == files(tmp_path / name / "local")


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(InputError, match="--beam_option=jobname=x: Beam has no option 'jobname'.*job_name"):
        beam.make_options("DirectRunner", ["job_name=fine", "jobname=x"])
    with pytest.raises(InputError, match="--beam_option: argument --direct_num_workers: invalid int value: 'two'"):
        beam.make_options("DirectRunner", ["direct_num_workers=two"])
    listing = functools.partial(coco_items, SAMPLE_DIR, "train2017")
    with pytest.raises(InputError, match="--runner=NoRunner: "):
        convert(tmp_path / "runner", beam.shard_writer(listing, encode_item, beam.make_options("NoRunner", [])))
    shutil.copytree(SAMPLE_DIR, tmp_path / "sample")
    photo = sorted((tmp_path / "sample" / "train2017").iterdir())[-1]
    photo.write_bytes(b"no photo")
    items, source = coco_items(str(tmp_path / "sample"), "train2017")
    options = dict(output_dir=str(tmp_path / "bad"), source=source, shards=2, progress=False)
    with pytest.raises(InputError, match=photo.name):
        convert_split(items, encode_item, COCO, "train2017", **options, write=by_beam(tmp_path / "sample"))
    [shard] = (tmp_path / "bad").glob("train*.tfrecord")
    assert photo.name.encode() not in shard.read_bytes()


def test_a_worker_that_lists_other_items_is_named(tmp_path):
    items, source = coco_items(SAMPLE_DIR, "train2017")
    write = beam.shard_writer(lambda: (items, b"other"), encode_item, beam.make_options("DirectRunner", []))
    with pytest.raises(InputError, match="lists other items than the machine that started the job"):
        options = dict(output_dir=str(tmp_path), source=source, shards=2, progress=False)
        convert_split(items, encode_item, COCO, "train2017", **options, write=write)
    assert not list(tmp_path.glob("*.tfrecord"))
