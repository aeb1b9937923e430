"""The task of translation: its model, data, loss and predictions, without the training loop."""

import tensorflow as tf

from axial.data.specs import TextSpec
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, Count, Natural, NonNegative, check_arguments
from axial.models.outputs import LOGITS
from axial.models.registry import ModelConfig
from axial.tasks.base import Task
from axial.tasks.translation.evaluation import TRANSLATION, translations
from axial.tasks.translation.feed import TextData, cut, training_text, unfolded
from axial.tasks.translation.server import TextServer


class BestScores(schemas.Struct):
    """best/scores.json of a translator."""

    bleu: float
    tokenized_bleu: float | None = None
    chrf: float | None = None


class TranslationTask(Task):
    """What a trainer, an evaluator and an exporter need to know of a translator.

    The values by default are those of Vaswani et al., NeurIPS 2017, Sec. 5.4 and 6.1.

    Args:
        model: `ModelConfig`.
        data: `TextData`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        label_smoothing: share of the target that all pieces of the vocabulary get alike.
        beams: of beam search; 1 for greedy search.
        alpha: of its length penalty; see `Translator.translate`.
        longer: how many tokens a translation may have more than its source is padded to.
        spec: `TextSpec`; by default the one that the training split was converted under.

    Raises:
        InputError: no such data; a model that is not a translator.
    """

    evaluation = TRANSLATION
    models, labels = ("translation",), "text"
    configures = (TextData,)
    best_scores = BestScores
    trained_by = ("label_smoothing",)
    served = (
        ("translation", "string", "[N]", "the sentences in the other language"),
        ("score", "float32", "[N]", "log probability by the length penalty, at most 0"),
    )
    server = TextServer
    batches = staticmethod(training_text)
    counted = branched = True

    def __init__(
        self,
        model: ModelConfig,
        data: TextData,
        data_dir: str,
        label_smoothing: BelowOne = 0.1,
        beams: Count = 4,
        alpha: NonNegative = 0.6,
        longer: Natural = 50,
        spec: TextSpec | None = None,
    ):
        super().__init__(model, data, data_dir, spec)
        self.label_smoothing, self.beams, self.alpha, self.longer = label_smoothing, beams, alpha, longer
        check_arguments(self)
        self.row = self.data.lengths[-1]
        self.canvas, self.looks = (self.row,), {"reverse": self.data.reverse}

    def main_score(self, scores):
        """The number by which checkpoints are compared: BLEU."""
        return scores["bleu"]

    # === Training ===

    def by_shape(self, compute, batch):
        """compute(batch) for a batch of sentences of its bucket's own shape: one branch for each bucket."""

        def branch(length):
            return lambda: compute({name: unfolded(batch[name], length) for name in ("source", "target")})

        return tf.switch_case(batch["bucket"][0], [branch(length) for length in self.data.lengths])

    def counts(self, model, batch):
        """dict of what `losses` divides by, here of the number of real tokens of a part of a batch."""
        del model
        return {"total": tf.reduce_sum(_is_real(batch["target"]))}

    def losses(self, model, batch, whole=None):
        """dict of the loss of a training step, 'total', a mean over the real tokens of the whole batch.

        Args:
            model, batch: of a part of a batch.
            whole: see `whole_batch`; by default the part is the whole batch.
        """
        counts, parts = whole or (self.counts(model, batch), 1)
        target, vocabulary = batch["target"], self.spec.num_classes
        logits = model({"source": batch["source"], "target": target}, training=True)[LOGITS]
        share = self.label_smoothing / vocabulary
        wanted = tf.one_hot(target, vocabulary, 1 - self.label_smoothing + share, share)
        found = tf.nn.softmax_cross_entropy_with_logits(wanted, logits)
        return {"total": parts * tf.reduce_sum(found * _is_real(target)) / counts["total"]}

    # === Prediction ===

    def translate(self, model, source):
        """Ids and scores of int32 [B, length]; see `Translator.translate`."""
        length = source.shape[1] + self.longer
        return model.translate(source, length, end=self.spec.end, beams=self.beams, alpha=self.alpha)

    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of examples that yields each with its translation; see `translations`."""
        if tuple(scales) != (1.0,) or flip:
            raise InputError("--scales, --flip, --multi_scale: for photos; the task is translation")
        return translations(lambda source: self.translate(model, source), self.spec, self.data.lengths, strategy)

    def example(self, text):
        """A sentence, string [], as `predictions` takes it."""
        return {"ids": cut(tf.constant(self.spec.encode(text.numpy().decode()), tf.int32), self.canvas[0])}

    def serve(self, model, ids):
        """The translation of one sentence, int32 [n], as ids and its score. A longer one is cut to the canvas."""
        ids, lengths = cut(ids, self.canvas[0]), tf.constant(self.data.lengths)

        def branch(length):
            def run():
                source = tf.ensure_shape(tf.pad(ids, [[0, length - tf.size(ids)]]), [length])
                found, score = self.translate(model, source[None])
                return tf.pad(found[0], [[0, self.data.lengths[-1] - length]]), score[0]

            return run

        bucket = tf.searchsorted(lengths, tf.size(ids)[None])[0]
        return tf.switch_case(bucket, [branch(length) for length in self.data.lengths])

    def settings(self):
        """What predictions depend on beside the weights and the lengths, for JSON."""
        own = {name: getattr(self, name) for name in ("beams", "alpha", "longer")}
        return {**own, "lengths": self.data.lengths, **self.looks}


def _is_real(tokens):
    """float32: 1 for a token, 0 for padding."""
    return tf.cast(tokens != 0, tf.float32)
