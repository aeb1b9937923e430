"""Lists the sentence pairs of two text files as items for `convert_split`, and trains a joint vocabulary."""

import base64
import hashlib
import io
import os

from axial.data.specs import TextSpec, read_pieces
from axial.errors import InputError
from axial.io import gfile
from axial.io.paths import inside
from axial.io.read import read_file
from axial.io.write import write_bytes

LARGEST_LINES = 2**33  # largest text file, in bytes
VOCABULARY = "vocabulary.model"


# Pieces of the joint vocabulary: 37,000 for WMT14 (Vaswani et al., NeurIPS 2017, Sec. 5.1). 4,000 is our choice.
SIZES = {"multi30k": 4000, "wmt14": 37000}


def read_pairs(input_dir, split, languages):
    """The sentence pairs of a split.

    Args:
        input_dir: folder of the files SPLIT.SOURCE and SPLIT.TARGET.
        split: name of the split.
        languages: (source, target), the suffixes of the files.

    Returns:
        list of (line number from 0, source, target), without pairs in which a sentence is empty; the number of such
        pairs; and bytes that identify the files.

    Raises:
        InputError: a file is missing or not UTF-8 (the message names the line), or the files differ in their number of
            lines.
    """
    paths = [inside(input_dir, f"{split}.{language}", "--split, --languages") for language in languages]
    digest, sides = hashlib.sha256(), []
    for path in paths:
        data = read_file(path, LARGEST_LINES)
        digest.update(data)
        sides.append(lines_of(path, data))
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{paths[1]}: {len(sides[1])} lines, {paths[0]} has {len(sides[0])}; one is expected for each")
    pairs = [(i, *pair) for i, pair in enumerate(zip(*sides)) if all(pair)]
    return pairs, len(sides[0]) - len(pairs), digest.digest()


def lines_of(path, data):
    """Lines of a text, given as bytes, without surrounding space. Only line feeds end a line. Raises InputError."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line}: not UTF-8 ({error.reason})") from None
    return [line.strip() for line in (lines if lines[-1] else lines[:-1])]


def pair_items(pairs, spec):
    """Items of sentence pairs from `read_pairs`, for `convert_split`."""
    return [{"text": pair, "spec": spec} for pair in pairs]


def encode_pair(item):
    """Fields of a pair's record (see `tfrecord`), and an empty list of remarks."""
    number, source, target = item["text"]
    texts = {"source": source, "target": target}
    fields = {f"{side}/ids": item["spec"].encode(text) for side, text in texts.items()}
    fields |= {f"{side}/text": text for side, text in texts.items()}
    return {"text/id": number, **fields}, []


def train_vocabulary(pairs, size):
    """Bytes of a SentencePiece model that is trained on both sides of the pairs. Equal pairs give equal bytes.

    Args:
        pairs: sentence pairs from `read_pairs`.
        size: number of pieces.

    Raises:
        InputError: the text has too few different characters or words for the size.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text for _, *pair in pairs for text in pair]),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise InputError(f"--vocabulary_size={size}: no such vocabulary of this text ({reason})") from None
    return model.getvalue()


def find_vocabulary(output_dir, given, pairs, size=None, *, default=None):
    """Bytes of the SentencePiece model in a converted data set's folder. If there is none yet, it is written.

    Args:
        output_dir: folder of the data set.
        given: path of a SentencePiece model, or None.
        pairs: function that returns `read_pairs` of the training split, or None if that split is not converted now.
        size: number of pieces that the user requests, or None.
        default: number of pieces to train if `size` is None.

    Raises:
        InputError: the folder has another vocabulary, or one of another size; it has none, and there is no training
            split; a file is not such a model; both `given` and `size` are set. After an error, nothing is written.
    """
    if given and size:
        raise InputError(f"--vocabulary_size={size}: for a vocabulary of the training split, not for --vocabulary")
    path = os.path.join(output_dir, VOCABULARY)
    model = read_file(given) if given else None
    if gfile.exists(path):
        stored = read_file(path)
        if model not in (None, stored):
            raise InputError(f"{path}: another vocabulary than --vocabulary={given}; choose another --output_dir")
        pieces = read_pieces(path, stored).vocab_size()
        if size not in (None, pieces):
            raise InputError(f"--vocabulary_size={size}: {path} has {pieces} pieces; choose another --output_dir")
        return stored
    if model is None and pairs is None:
        raise InputError(f"{path}: no vocabulary yet; convert the training split first, or give --vocabulary")
    if model is None:
        model = train_vocabulary(pairs()[0], size or default)
    else:
        read_pieces(f"--vocabulary={given}", model)
    write_bytes(path, model)
    return model


def text_spec(name, languages, model):
    """The `TextSpec` of a data set, from the bytes of a SentencePiece model."""
    return TextSpec(name, tuple(languages), base64.b64encode(model).decode())
