"""Scores of translators: BLEU and chrF."""

import functools
import textwrap

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from axial.io import schemas
from axial.io.read import convert
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.metrics import bleu
from axial.tasks.base import Description, Evaluation
from axial.tasks.scores import JsonResults, Scores


class TranslationScores(Scores):
    """The sentences that were scored, and their BLEU.

    Args:
        spec: `TextSpec`.
        shard: (i, n) if it scores every n-th sentence of the split, from the i-th on.
    """

    def __init__(self, spec, shard=(0, 1)):
        super().__init__(spec, shard)
        self.pairs = []  # (translation, reference)

    def update(self, example, prediction):
        """Adds one sentence. Returns its translation."""
        text, reference = prediction["translation"], example["reference"].numpy().decode()
        self.add_photo(str(int(example["id"])), bleu.sentence_score(text, reference))
        self.pairs.append((text, reference))
        return text

    def merge(self, other):
        """Adds another part of the split."""
        both = sorted(zip(self.photos + other.photos, self.pairs + other.pairs))
        self.photos, self.pairs = [photo for photo, _ in both], [pair for _, pair in both]

    def state(self):
        """The sums in a form that JSON can hold."""
        return {"pairs": self.pairs, "photos": self.photos}

    def restore(self, state):
        """Sets the sums to those of a `state`."""
        self.pairs = [(str(text), str(reference)) for text, reference in state["pairs"]]
        self.photos = [[int(number), str(name), float(score)] for number, name, score in state["photos"]]

    def result(self):
        """See `bleu.scores`."""
        return bleu.scores([text for text, _ in self.pairs], [reference for _, reference in self.pairs])


class TranslatedSentence(schemas.Strict):
    """A sentence in a translator's results."""

    id: schemas.Count
    source: str
    reference: str
    translation: str


class TranslationResults(JsonResults):
    """Writes all translations of a split to one JSON, translation_SPLIT.json."""

    kind = "translation"

    def check(self, where, annotations):
        """Raises InputError unless the annotations of a state are such results."""
        convert(where, annotations, list[TranslatedSentence])

    def add(self, example, text):
        """Adds one sentence."""
        texts = {name: example[name].numpy().decode() for name in ("source", "reference")}
        self.annotations.append({"id": int(example["id"]), **texts, "translation": text})

    def seen(self, index):
        """What `add` was given for sentence number `index`."""
        return self.annotations[index]["translation"]

    def close(self):
        """Writes the JSON."""
        sentences = sorted(self.annotations, key=lambda sentence: sentence["id"])
        write_json(self.path, {"languages": list(self.spec.languages), "sentences": sentences})


class TranslationEvaluation(Evaluation):
    """The evaluation of translators."""

    name, labels = "translation", "text"
    one_file = False
    takes, unit = "text", "sentence"
    scores = TranslationScores
    quality = "chrF"
    results = TranslationResults
    pictures = ("sentence",)
    briefly = ("bleu", "bleu"), ("chrf", "chrf")

    def truth(self, record, spec):
        """The 'id' of a record and its texts, 'source' and 'reference'."""
        del spec
        return {"id": record["text/id"], "source": record["source/text"], "reference": record["target/text"]}

    def given(self, example):
        """The source of an evaluation example."""
        return example["source"].numpy().decode()

    def example(self, given):
        """An example of a sentence, for `predictions`."""
        return {"source": tf.constant(given)}

    def predictions(self, signatures, spec, about):
        """See `Evaluation.predictions`."""

        def run(examples):
            for example in examples:
                found = signatures["text"](text=tf.constant([self.given(example)]))
                yield example, {"translation": found["translation"][0].numpy().decode(), "score": found["score"][0]}

        return run

    def draw(self, example, text, spec):
        """A tuple of one picture, uint8 [h, w, 3], of source, reference and translation."""
        texts = {"source": self.given(example), "reference": example["reference"].numpy().decode(), "translation": text}
        return (write_lines([f"{name}: {text}" for name, text in texts.items()]),)

    def describe(self, text, prediction, spec):
        """The `Description` of a sentence: its translation."""
        del spec
        translation = str(prediction["translation"])
        content = {"source": text, "translation": translation, "score": round(float(prediction["score"]), 6)}
        lines = [f"{name}: {content[name]}" for name in ("source", "translation")]
        return Description(content, translation, draw=functools.partial(write_lines, lines))

    def headline(self, result):
        """The scores that a table of evaluations shows."""
        return {name: result[name] for name in ("bleu", "tokenized_bleu", "chrf")}

    def classes(self, result):
        """See `Evaluation.classes`: the scores with their signatures."""
        about = {"tokenized_bleu": "13a tokens, compounds split; "}
        rows = [
            [name, percent(value, 2), about.get(name, "") + result["signatures"].get(name, "")]
            for name, value in self.headline(result).items()
        ]
        return ["score", "%", "sacrebleu's signature"], rows, []


TRANSLATION = TranslationEvaluation()


def write_lines(lines, width=800, size=20):
    """Lines of text, broken where they are too wide, black on white: uint8 [h, width, 3]."""
    font = ImageFont.load_default(size)
    letters = int((width - size) / font.getlength("n"))
    rows = [row for line in lines for row in textwrap.wrap(plain(line), letters) or [""]]
    image = Image.new("RGB", (width, (2 * len(rows) + 1) * size // 2 * 3 // 2), "white")
    ImageDraw.Draw(image).multiline_text((size // 2, size // 2), "\n".join(rows), fill="black", font=font)
    return np.asarray(image)
