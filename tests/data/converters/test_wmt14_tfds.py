"""wmt14_translate of tensorflow-datasets gives the records of the same sentences in text files."""

import json

import pytest
import tensorflow as tf
from tensorflow_datasets.translate import wmt14

from axial.data.converters import text, wmt14_tfds
from axial.data.tfrecord import parse_example, read_manifest, shard_paths
from axial.errors import InputError
from tests.data.text_fixture import write_pairs

SIZES = {"train": 96, "newstest2013": 7, "newstest2014": 5}


class Wmt14Translate(wmt14.Wmt14Translate, skip_registration=True):
    """The published builder, on made-up sentences in place of its archives."""

    BUILDER_CONFIGS = tuple(one for one in wmt14.Wmt14Translate.BUILDER_CONFIGS if one.name == "de-en")

    def _split_generators(self, dl_manager):
        return {theirs: self._generate_examples(ours) for ours, theirs in wmt14_tfds.SPLITS.items()}

    def _generate_examples(self, split):
        pairs, *_ = text.read_pairs(self.texts, split, ("en", "de"))
        yield from ((number, {"en": source, "de": target}) for number, source, target in pairs)
        yield len(pairs), {"en": "alone", "de": " "}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for split, count in SIZES.items():
        write_pairs(folder, split, count, seed=count)
    return folder


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    builder = Wmt14Translate(config="de-en", data_dir=str(root))
    builder.texts = str(texts)
    builder.download_and_prepare()
    return root


def test_the_command_writes_the_sentences_of_text_files(command, texts, prepared, tmp_path):
    flags = [f"--split={split}" for split in SIZES]
    for name, folder, own in (("wmt14", texts, ["--vocabulary_size=64"]), ("wmt14_tfds", prepared, [])):
        model = [] if own else [f"--vocabulary={tmp_path}/wmt14/{text.VOCABULARY}"]
        places = f"--input_dir={folder}", f"--output_dir={tmp_path}/{name}"
        done = command("convert", name, *places, *flags, *own, *model)
        assert done.code == 0, done.err
    assert done.out.count("1 pair with an empty line left out") == 3
    for split, count in SIZES.items():
        found = []
        for name in ("wmt14", "wmt14_tfds"):
            manifest = read_manifest(f"{tmp_path}/{name}", split)
            records = map(parse, tf.data.TFRecordDataset(shard_paths(f"{tmp_path}/{name}", manifest)))
            found.append((manifest["spec"], sorted(records)))
        assert found[0] == found[1] and len(found[0][1]) == count


def parse(record):
    """A record's fields but its number, as JSON."""
    fields = parse_example(record, "text")
    texts = [fields[f"{side}/text"].numpy().decode() for side in ("source", "target")]
    return json.dumps(texts + [fields[f"{side}/ids"].numpy().tolist() for side in ("source", "target")])


def test_the_other_direction_and_the_same_bytes_again(prepared):
    pairs, empty, digest = wmt14_tfds.read_pairs(str(prepared), "newstest2014", ("de", "en"))
    assert len(pairs) == 5 and empty == 1 and all(source == target[::-1] for _, source, target in pairs)
    assert wmt14_tfds.read_pairs(str(prepared), "newstest2014", ("de", "en")) == (pairs, empty, digest)


def test_what_is_refused(prepared, tmp_path):
    with pytest.raises(InputError, match="--split=newstest2012: one of train, newstest2013, newstest2014"):
        wmt14_tfds.read_pairs(str(prepared), "newstest2012", ("en", "de"))
    with pytest.raises(InputError, match="--languages=fr,de: expected en and one other"):
        wmt14_tfds.read_pairs(str(prepared), "train", ("fr", "de"))
    with pytest.raises(InputError, match="fr-en: not prepared; run tfds build wmt14_translate/fr-en --data_dir="):
        wmt14_tfds.read_pairs(str(prepared), "train", ("en", "fr"))
