"""Sentence pairs: refused and skipped lines, and batches with static shapes, every pair, and resumable order."""

import os

import numpy as np
import pytest
import tensorflow as tf

from axial.data.converters import text
from axial.data.streams import Stream, check_records
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.translation import input_pipeline
from axial.tasks.translation.task import TranslationTask
from tests.data.text_fixture import SIZE, convert_texts, write_pairs

LENGTHS = (8, 16, 32)


def spec_of(folder, split="train"):
    return read_manifest(folder, split)["spec"]


def batches(folder, count, lengths=LENGTHS, batch=96, seed=3, **options):
    data = input_pipeline.TextData("train", "val", lengths)
    stream = input_pipeline.training_text(folder, data, spec_of(folder), Stream(batch, seed, **options))
    return [{name: x.numpy() for name, x in batch.items()} for batch in stream.take(count)]


def evaluated(folder, split, length, reverse=False, **options):
    data = input_pipeline.TextData("train", "val", (length,), reverse)
    return TranslationTask(ModelConfig("transformer_nano"), data, folder).eval_dataset(split, **options)


def sentences(batch, lengths=LENGTHS):
    """Returns (source ids, target ids) of each pair in a batch, without padding."""
    length = lengths[batch["bucket"][0]]
    sides = (input_pipeline.unpack_rows(batch[name], length).numpy() for name in ("source", "target"))
    return [tuple(tuple(row[row != 0]) for row in pair) for pair in zip(*sides)]


# === Conversion ===


def test_the_records_are_the_lines(texts_dir):
    spec = spec_of(texts_dir)
    examples = list(evaluated(texts_dir, "val", 64))
    numbers = [int(example["id"]) for example in examples]
    assert sorted(numbers) == list(range(7)) != numbers
    for example in examples:
        source, reference = (example[name].numpy().decode() for name in ("source", "reference"))
        assert source == reference[::-1] and spec.decode(example["ids"]) == source
        assert example["ids"][-1] == spec.end
    mirrored = list(evaluated(texts_dir, "val", 64, reverse=True))
    assert [e["source"].numpy() for e in mirrored] == [e["reference"].numpy() for e in examples]
    shards = [list(evaluated(texts_dir, "val", 64, shard=(i, 3), skip=1)) for i in range(3)]
    assert [[int(example["id"]) for example in rows] for rows in shards] == [numbers[i::3] for i in (3, 4, 5)]
    check_records(texts_dir, "val")


def test_conversion_repeats_and_keeps_its_vocabulary(texts_dir, tmp_path):
    write_pairs(tmp_path / "texts", "train", 96, seed=96)
    write_pairs(tmp_path / "texts", "val", 7, seed=7)
    convert_texts(tmp_path / "texts", tmp_path / "data")
    for name in sorted(os.listdir(texts_dir)):
        with open(os.path.join(texts_dir, name), "rb") as file:
            assert file.read() == (tmp_path / "data" / name).read_bytes(), name
    model = (tmp_path / "data" / text.VOCABULARY).read_bytes()
    for size in (None, SIZE):
        assert text.find_vocabulary(str(tmp_path / "data"), None, None, size, default=9999) == model
    with pytest.raises(InputError, match=rf"--vocabulary_size=9999: .*{text.VOCABULARY} has {SIZE} pieces"):
        text.find_vocabulary(str(tmp_path / "data"), None, None, 9999)
    (tmp_path / "other.model").write_bytes(model + b"x")
    with pytest.raises(InputError, match="another vocabulary than --vocabulary="):
        text.find_vocabulary(str(tmp_path / "data"), str(tmp_path / "other.model"), None)
    with pytest.raises(InputError, match="no vocabulary yet; convert the training split first"):
        text.find_vocabulary(str(tmp_path / "new"), None, None, 64)


def test_a_bad_vocabulary_is_named_and_not_kept(texts_dir, tmp_path):
    """If the folder kept the bad vocabulary, it would refuse the right vocabulary later."""
    picture, stored = tmp_path / "picture.png", tmp_path / "data" / text.VOCABULARY
    picture.write_bytes(b"a picture")
    with pytest.raises(InputError, match="--vocabulary=.*picture.png: not a SentencePiece model"):
        text.find_vocabulary(str(tmp_path / "data"), str(picture), None)
    assert not stored.exists()
    given = os.path.join(texts_dir, text.VOCABULARY)
    with pytest.raises(InputError, match=f"--vocabulary_size={SIZE}: .*not for --vocabulary"):
        text.find_vocabulary(str(tmp_path / "data"), given, None, SIZE)
    assert text.find_vocabulary(str(tmp_path / "data"), given, None) == stored.read_bytes()
    stored.write_bytes(b"a picture")
    with pytest.raises(InputError, match=f"data/{text.VOCABULARY}: not a SentencePiece model"):
        text.find_vocabulary(str(tmp_path / "data"), None, None)


def test_empty_lines_are_left_out_and_counted(tmp_path):
    (tmp_path / "train.en").write_text("\ufeffone\n\n three \nfour\u2028still four\n", "utf-8")
    (tmp_path / "train.de").write_text("eins\nzwei\ndrei\n \n", "utf-8")
    pairs, empty, _ = text.read_pairs(str(tmp_path), "train", ("en", "de"))
    assert pairs == [(0, "one", "eins"), (2, "three", "drei")] and empty == 2


BAD = {
    "one line too few": (b"eins\nzwei\n", r"train.de: 2 lines, .*train.en has 3"),
    "not UTF-8": (b"eins\nz\xffei\ndrei\n", r"train.de: line 2: not UTF-8 \(invalid start byte\)"),
    "not there": (None, "train.de: no such file"),
}


@pytest.mark.parametrize("data,words", BAD.values(), ids=BAD)
def test_bad_texts_are_named(data, words, tmp_path):
    (tmp_path / "train.en").write_bytes(b"one\ntwo\nthree\n")
    if data is not None:
        (tmp_path / "train.de").write_bytes(data)
    with pytest.raises(InputError, match=words):
        text.read_pairs(str(tmp_path), "train", ("en", "de"))


def test_other_bad_input_is_named(texts_dir):
    with pytest.raises(InputError, match="--vocabulary_size=5000: no such vocabulary"):
        text.train_vocabulary([(0, "a b", "c d")], 5000)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        text.text_spec("mirror", ("en", "de"), b"a picture")
    for lengths in ((16, 8), (6, 16)):
        with pytest.raises(InputError, match="rising lengths that divide the last"):
            input_pipeline.TextData("train", "val", lengths)
    with pytest.raises(InputError, match="batch 31: tokens; expected at least 32, a row on each replica"):
        batches(texts_dir, 1, batch=31)
    with pytest.raises(InputError, match="no pair of 'val' has at most 2 tokens"):
        input_pipeline.Sentences(texts_dir, input_pipeline.TextData("val", "val", (2,)), spec_of(texts_dir))


# === Batches ===


def test_an_epoch_has_every_pair_that_fits(texts_dir, capfd):
    data = input_pipeline.TextData("train", "val", LENGTHS)
    whole = input_pipeline.Sentences(texts_dir, data, spec_of(texts_dir))
    count = len(whole.epoch(3, 0, 3))
    actual = [pair for batch in batches(texts_dir, count) for pair in sentences(batch)]
    spec, expected = spec_of(texts_dir), set()
    for example in evaluated(texts_dir, "train", 999):
        pair = tuple(tuple(spec.encode(example[name].numpy().decode())) for name in ("source", "reference"))
        if max(map(len, pair)) <= 32:
            expected.add(pair)
    assert set(actual) == expected and 0 < len(expected) < 96
    assert f"{whole.dropped} of 96 pairs of 'train' have more than 32 tokens" in capfd.readouterr().err


def test_batches_are_static_and_in_the_first_bucket_that_fits(texts_dir):
    actual = batches(texts_dir, 12)
    for batch in actual:
        assert batch["source"].shape == batch["target"].shape == (3, 32) and batch["bucket"].shape == (3,)
        bucket = batch["bucket"][0]
        for pair in sentences(batch):
            assert np.searchsorted(LENGTHS, max(map(len, pair))) == bucket
    assert {batch["bucket"][0] for batch in actual} == {0, 1, 2}


def test_a_resumed_stream_goes_on(texts_dir):
    whole = batches(texts_dir, 36)  # more than an epoch
    for a, b in zip(whole[33:], batches(texts_dir, 3, first_step=33), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert any(not np.array_equal(a["source"], b["source"]) for a, b in zip(whole, batches(texts_dir, 5, seed=4)))


def test_replicas_and_hosts_share_the_steps(texts_dir):
    """Four replicas on two hosts get the same batches as four replicas on one host."""

    def host(number, hosts):
        context = tf.distribute.InputContext(hosts, number, 4)
        return batches(texts_dir, 3 * 4 // hosts, batch=4 * 32, first_step=2, context=context)

    one, two = host(0, 1), [host(i, 2) for i in range(2)]
    for step in range(3):
        parts = [batch for host_batches in two for batch in host_batches[2 * step : 2 * step + 2]]
        for a, b in zip(one[4 * step : 4 * step + 4], parts, strict=True):
            np.testing.assert_array_equal(a["source"], b["source"])


def test_long_sources_are_cut_and_still_end(texts_dir):
    spec = spec_of(texts_dir)
    for ids in ([7, 8, 9, spec.end], [7, 8, 9, 7, 8, spec.end]):
        np.testing.assert_array_equal(
            input_pipeline.truncate(tf.constant(ids), 5), ids if len(ids) <= 5 else [*ids[:4], spec.end]
        )
