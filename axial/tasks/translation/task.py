"""Translation: metrics, prediction writer, evaluator, text server and task."""

import dataclasses
import functools
import textwrap

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from axial.data.specs import text_operations
from axial.data.streams import Stream
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, Count, Natural, NonNegative
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.metrics import bleu
from axial.models.outputs import LOGITS
from axial.tasks.base import Description, DistributedPredictor, Evaluator, Inference, Task
from axial.tasks.metrics import Metrics, PredictionWriter
from axial.tasks.translation.input_pipeline import TextData, training_text, truncate, unpack_rows


class TranslationMetrics(Metrics):
    """BLEU and chrF. All translations are kept, as BLEU is a score of the whole split.

    Args:
        spec: `TextSpec`.
        shard: (i, n) to score every n-th sentence of the split, from the i-th on.
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
        """Adds the scores of another shard."""
        both = sorted(zip(self.photos + other.photos, self.pairs + other.pairs))
        self.photos, self.pairs = [photo for photo, _ in both], [pair for _, pair in both]

    def state(self):
        """The accumulated scores as a dict for JSON."""
        return {"pairs": self.pairs, "photos": self.photos}

    def restore(self, state):
        """Sets the scores from a `state`."""
        self.pairs = [(str(text), str(reference)) for text, reference in state["pairs"]]
        self.photos = [[int(number), str(name), float(score)] for number, name, score in state["photos"]]

    def result(self):
        """dict of the scores of the split; see `bleu.scores`."""
        return bleu.scores([text for text, _ in self.pairs], [reference for _, reference in self.pairs])


class TranslatedSentence(schemas.Strict):
    """The translation of a sentence in a translator's JSON."""

    id: schemas.Count
    source: str
    reference: str
    translation: str


class TranslationPredictionWriter(PredictionWriter):
    """Writes all translations of a split to one JSON, translation_SPLIT.json."""

    kind, schema = "translation", TranslatedSentence

    def add(self, example, text):
        """Adds one sentence."""
        texts = {name: example[name].numpy().decode() for name in ("source", "reference")}
        self.annotations.append({"id": int(example["id"]), **texts, "translation": text})

    def decoded(self, index):
        """The translation that `add` was given for sentence number `index`."""
        return self.annotations[index]["translation"]

    def close(self):
        """Writes the JSON."""
        sentences = sorted(self.annotations, key=lambda sentence: sentence["id"])
        write_json(self.path, {"languages": list(self.spec.languages), "sentences": sentences})


class TranslationEvaluator(Evaluator):
    """Evaluator of translation."""

    name, labels = "translation", "text"
    one_file = False
    takes, unit = "text", "sentence"
    metrics = TranslationMetrics
    quality = "chrF"
    writer = TranslationPredictionWriter
    pictures = ("sentence",)
    shown = "bleu", "tokenized_bleu", "chrf"
    briefly = ("bleu", "bleu"), ("chrf", "chrf")

    def truth(self, record, spec):
        """dict of a record's 'id' and its texts, 'source' and 'reference'."""
        del spec
        return {"id": record["text/id"], "source": record["source/text"], "reference": record["target/text"]}

    def given(self, example):
        """The source sentence of an evaluation example."""
        return example["source"].numpy().decode()

    def example(self, given):
        """An example for `predictions`, from a sentence."""
        return {"source": tf.constant(given)}

    def predictions(self, signatures, spec, about):
        """See `Evaluator.predictions`."""

        def run(examples):
            for example in examples:
                outputs = signatures["text"](text=tf.constant([self.given(example)]))
                yield example, {"translation": outputs["translation"][0].numpy().decode(), "score": outputs["score"][0]}

        return run

    def draw(self, example, text, spec):
        """A tuple of one picture, uint8 [h, w, 3], with the source, the reference and the translation."""
        texts = {"source": self.given(example), "reference": example["reference"].numpy().decode(), "translation": text}
        return (write_lines([f"{name}: {text}" for name, text in texts.items()]),)

    def describe(self, text, prediction, spec):
        """The `Description` of a sentence's translation."""
        del spec
        translation = str(prediction["translation"])
        content = {"source": text, "translation": translation, "score": round(float(prediction["score"]), 6)}
        lines = [f"{name}: {content[name]}" for name in ("source", "translation")]
        return Description(content, translation, draw=functools.partial(write_lines, lines))

    def classes(self, result):
        """See `Evaluator.classes`. Each row has a score and sacrebleu's signature."""
        about, rows = {"tokenized_bleu": "13a tokens, compounds split; "}, []
        for name, value in self.headline(result).items():
            rows.append([name, percent(value, 2), about.get(name, "") + result["signatures"].get(name, "")])
        return ["score", "%", "sacrebleu's signature"], rows, []


TRANSLATION = TranslationEvaluator()


def write_lines(lines, width=800, size=20):
    """A picture of lines of text, wrapped to the width, black on white: uint8 [h, width, 3]."""
    font = ImageFont.load_default(size)
    letters = int((width - size) / font.getlength("n"))
    rows = [row for line in lines for row in textwrap.wrap(plain(line), letters) or [""]]
    image = Image.new("RGB", (width, (2 * len(rows) + 1) * size // 2 * 3 // 2), "white")
    ImageDraw.Draw(image).multiline_text((size // 2, size // 2), "\n".join(rows), fill="black", font=font)
    return np.asarray(image)


BATCH, AHEAD = 32, 512  # sentences in a replica's batch; sentences read ahead, to batch sentences of one length


class BestScores(schemas.Struct):
    """best/scores.json of a translator."""

    bleu: float
    tokenized_bleu: float | None = None
    chrf: float | None = None


class TextServer(tf.Module):
    """The signatures of a translator's export. Loading an export needs `import tensorflow_text`, for its ops.

    'serving_default', also called 'text', takes sentences, string [N]. It returns 'translation', string [N], and
    'score', float32 [N], the log probability divided by the length penalty. Sentences are translated one by one, and
    truncated to the canvas. 'classes' has no inputs. It returns the canvas, (largest number of tokens,), the two
    languages, and the name of the task's `Evaluator`.

    Args:
        task: `TranslationTask`.
        model: the task's model.
    """

    def __init__(self, task, model):
        super().__init__()
        text = text_operations()
        self.weights = model.weights
        self.pieces = text.SentencepieceTokenizer(task.spec.model, out_type=tf.int32, add_eos=True)
        self._task = task
        self._serve = functools.partial(task.serve, model)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def text(self, text):
        signature = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.float32)
        ids, score = tf.map_fn(self._serve, self.pieces.tokenize(text), fn_output_signature=signature)
        ends = tf.cumsum(tf.cast(ids == self._task.spec.end, tf.int32), 1)
        kept = tf.ragged.boolean_mask(ids, (ends == 0) & (ids != 0))
        return {"translation": self.pieces.detokenize(kept), "score": score}

    @tf.function(autograph=False, input_signature=[])
    def classes(self):
        return {
            "canvas": tf.constant(self._task.canvas),
            "languages": tf.constant(self._task.spec.languages),
            "kind": tf.constant(self._task.evaluator.name),
        }

    def signatures(self):
        return {"serving_default": self.text, "text": self.text, "classes": self.classes}

    def requests(self):
        """See `Server.requests`."""
        return [("serving_default", {"text": ["a"]})]


@dataclasses.dataclass(eq=False)
class TranslationTask(Task):
    """The task of translation. The defaults are from Vaswani et al., NeurIPS 2017, Sec. 5.4 and 6.1.

    Args:
        model: `ModelConfig`.
        data: `TextData`.
        data_dir: folder of the converted data set. If the folder has neither split of `data`, the task uses the only
            splits there whose names begin with 'train' and 'val'.
        label_smoothing: fraction of the target that is spread evenly over the vocabulary.
        beams: beam size of beam search.
        alpha: exponent of the length penalty; see `Translator.translate`.
        longer: largest number of tokens by which a translation may exceed the padded length of its source.
        spec: `TextSpec`; by default the spec of the converted training split.

    Raises:
        InputError: the data does not exist, or the model is not a translator.
    """

    evaluator = TRANSLATION
    models = ("translation",)
    configures = (TextData,)
    best_scores = BestScores
    trained_by = ("label_smoothing",)
    served = (
        ("translation", "string", "[N]", "the sentences in the other language"),
        ("score", "float32", "[N]", "log probability / length penalty, at most 0"),
    )
    server = TextServer
    counted = branched = True

    data: TextData
    label_smoothing: BelowOne = 0.1
    beams: Count = 4
    alpha: NonNegative = 0.6
    longer: Natural = 50

    def __post_init__(self):
        super().__post_init__()
        self.row = self.data.lengths[-1]
        self.canvas = (self.row,)
        self.settings = {"beams": self.beams, "alpha": self.alpha, "longer": self.longer}
        self.settings |= {"lengths": self.data.lengths, "reverse": self.data.reverse}

    def main_score(self, scores):
        """The score by which a training ranks its checkpoints: BLEU."""
        return scores["bleu"]

    # === Training ===

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """See `training_text`."""
        if service:
            raise InputError("--data_service: for photos; the task is translation")
        return training_text(self.data_dir, self.data, self.spec, Stream(batch, seed, first_step, context))

    def by_shape(self, compute, batch):
        """Returns compute(batch), with the rows reshaped to sentences. The graph has a branch for each bucket."""

        def branch(length):
            return lambda: compute({name: unpack_rows(batch[name], length) for name in ("source", "target")})

        return tf.switch_case(batch["bucket"][0], [branch(length) for length in self.data.lengths])

    def counts(self, model, batch):
        """dict of a micro-batch's divisor in `losses`: the number of tokens without padding."""
        del model
        return {"total": tf.reduce_sum(_token_mask(batch["target"]))}

    def losses(self, model, batch, whole=None):
        """dict of a train step's loss, 'total': the mean over the tokens of the global batch, without padding.

        Args:
            model: a model of `build_model`.
            batch: a micro-batch.
            whole: see `whole_batch`; None if the micro-batch is the global batch.
        """
        counts, micro_batches = whole or (self.counts(model, batch), 1)
        target, vocabulary = batch["target"], self.spec.num_classes
        logits = model({"source": batch["source"], "target": target}, training=True)[LOGITS]
        smoothing = self.label_smoothing / vocabulary
        labels = tf.one_hot(target, vocabulary, 1 - self.label_smoothing + smoothing, smoothing)
        entropy = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        return {"total": micro_batches * tf.reduce_sum(entropy * _token_mask(target)) / counts["total"]}

    # === Prediction ===

    def translate(self, model, source):
        """(Ids, scores) of translations of `source`, int32 [B, length]; see `Translator.translate`."""
        length = source.shape[1] + self.longer
        return model.translate(source, length, end=self.spec.end, beams=self.beams, alpha=self.alpha)

    def predictions(self, model, inference=Inference()):
        """A function that takes examples and yields (example, dict of 'translation', a text, and 'score').

        Each sentence is padded to the smallest of `lengths` that is long enough. So a translation does not depend on
        the other sentences.
        """
        if tuple(inference.scales) != (1.0,) or inference.flip:
            raise InputError("--scales, --flip, --multi_scale: for photos; the task is translation")

        def padded(example):
            ids, lengths = np.asarray(example["ids"]), self.data.lengths
            return (np.pad(ids, [0, lengths[np.searchsorted(lengths, len(ids))] - len(ids)]),)

        def translate(source):
            return dict(zip(("ids", "score"), self.translate(model, source)))

        def run(examples):
            for example, output in replicated(examples):
                translation = self.spec.decode(output["ids"].numpy())
                yield example, {"translation": translation, "score": output["score"].numpy()}

        replicated = DistributedPredictor(translate, inference.strategy, BATCH, inputs=padded, ahead=AHEAD)
        return run

    def look(self, record):
        """dict of a record's 'ids', the network's input, and of its texts, 'source' and 'reference'."""
        source, target = self.data.sides
        ids = truncate(tf.cast(record[f"{source}/ids"], tf.int32), self.canvas[0])
        return {"ids": ids, "source": record[f"{source}/text"], "reference": record[f"{target}/text"]}

    def example(self, text):
        """An example for `predictions`, from a sentence, string []."""
        return {"ids": truncate(tf.constant(self.spec.encode(text.numpy().decode()), tf.int32), self.canvas[0])}

    def serve(self, model, ids):
        """(Ids, score) of the translation of one sentence, int32 [n], which is truncated to the canvas."""
        ids, lengths = truncate(ids, self.canvas[0]), tf.constant(self.data.lengths)

        def branch(length):
            def run():
                source = tf.ensure_shape(tf.pad(ids, [[0, length - tf.size(ids)]]), [length])
                translated, score = self.translate(model, source[None])
                return tf.pad(translated[0], [[0, self.data.lengths[-1] - length]]), score[0]

            return run

        bucket = tf.searchsorted(lengths, tf.size(ids)[None])[0]
        return tf.switch_case(bucket, [branch(length) for length in self.data.lengths])


def _token_mask(tokens):
    """float32: 1 for a token, 0 for padding."""
    return tf.cast(tokens != 0, tf.float32)
