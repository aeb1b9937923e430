"""WMT14 as tensorflow-datasets prepares it (wmt14_translate/de-en), as sentence pairs; see `text.read_pairs`."""

import hashlib

import tensorflow_datasets as tfds

from axial.data.converters.coco_tfds import prepared
from axial.errors import InputError

# tensorflow-datasets' development set of Hindi is newsdev2014, which has the place of newstest2013.
SPLITS = {"train": "train", "newstest2013": "validation", "newstest2014": "test"}


def read_pairs(input_dir, split, languages):
    """The sentence pairs of a split, in the order in which they were prepared.

    Args:
        input_dir: tensorflow-datasets' data_dir, in which wmt14_translate/LANGUAGE-en is prepared.
        split: one of `SPLITS`.
        languages: (source, target), one of which is en.

    Returns:
        See `text.read_pairs`; the numbers are those of the records.

    Raises:
        InputError: another split; languages without English; a data set that is not prepared; no sentence that is not
            empty, or one that is not UTF-8.
    """
    others = [language for language in languages if language != "en"]
    if len(others) != 1:
        raise InputError(f"--languages={','.join(languages)}: expected en and one other, as in en,de")
    builder = prepared(input_dir, f"wmt14_translate/{others[0]}-en", split, SPLITS)
    in_order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    records = builder.as_dataset(split=SPLITS[split], shuffle_files=False, read_config=in_order)
    digest, pairs, count = hashlib.sha256(), [], 0
    for batch in records.batch(4096).as_numpy_iterator():
        for sentences in zip(*(batch[language] for language in languages)):
            for sentence in sentences:
                digest.update(sentence + b"\n")
            try:
                pair = [sentence.decode().strip() for sentence in sentences]
            except UnicodeDecodeError as error:
                raise InputError(f"{builder.data_dir}: {split}: record {count}: not UTF-8 ({error.reason})") from None
            if all(pair):
                pairs.append((count, *pair))
            count += 1
    if not pairs:
        raise InputError(f"{builder.data_dir}: {split}: no sentence whose translation is not empty")
    return pairs, count - len(pairs), digest.digest()
