"""The task of translation: its model, data, loss and predictions, without the training loop."""

import dataclasses

import tensorflow as tf

from axial.data.specs import TextSpec
from axial.data.streams import spec_of
from axial.data.text import TextData, cut, evaluation_text, training_text, unfolded
from axial.data.tfrecord import find_splits
from axial.errors import InputError
from axial.evaluation.translation import TRANSLATION, Translations
from axial.io import schemas
from axial.io.check import BelowOne, Count, Natural, NonNegative, checked
from axial.models.registry import ModelConfig, check_model
from axial.outputs import LOGITS


@checked
class TranslationTask:
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

    loss_names = ("total",)
    kind = TRANSLATION
    multi_scale = (1.0,)
    best_scores = schemas.Bleu  # what `main_score` needs of a file of scores
    trained_by = ("label_smoothing",)  # arguments that the losses depend on, beside model and data

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
        check_model(model, "translation")
        train_split, eval_split = find_splits(data_dir, {"train": data.train_split, "val": data.eval_split})
        self.data = dataclasses.replace(data, train_split=train_split, eval_split=eval_split)
        self.model, self.data_dir, self.label_smoothing = model, data_dir, label_smoothing
        self.beams, self.alpha, self.longer = beams, alpha, longer
        self.spec = spec or spec_of(data_dir, self.data.train_split, "text")
        self.num_classes, self.canvas = self.spec.num_classes, (self.data.lengths[-1],)  # the most tokens of a source

    def build_model(self, folded=False):
        """The model with its weights. It has no batch norms to fold."""
        return self.model.build(self.num_classes, self.canvas, folded=folded)

    def main_score(self, scores):
        """The number by which checkpoints are compared: BLEU."""
        return scores["bleu"]

    # === Training ===

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """The stream of training batches; see `training_text`."""
        place = dict(batch=batch, seed=seed, first_step=first_step, context=context, service=service)
        return training_text(self.data_dir, self.data, self.spec, **place)

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

    def eval_dataset(self, split=None, canvas=None, shard=(0, 1), skip=0):
        """The sentences of a split (see `evaluation_text`); by default the evaluation split."""
        return self.photos(self.data_dir, split or self.data.eval_split, canvas=canvas, shard=shard, skip=skip)

    def photos(self, data_dir, split, canvas=None, **part):
        """The sentences of any converted split; see `evaluation_text`."""
        return evaluation_text(data_dir, split, self.spec, canvas or self.canvas, reverse=self.data.reverse, **part)

    def translate(self, model, source):
        """Ids and scores of int32 [B, length]; see `Translator.translate`."""
        length = source.shape[1] + self.longer
        return model.translate(source, length, end=self.spec.end, beams=self.beams, alpha=self.alpha)

    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of examples that yields each with its translation; see `Translations`."""
        if tuple(scales) != (1.0,) or flip:
            raise InputError("--scales, --flip, --multi_scale: for photos; the task is translation")
        return Translations(lambda source: self.translate(model, source), self.spec, self.data.lengths, strategy)

    def scores(self):
        """Empty sums of the scores of a split."""
        return TRANSLATION.scores(self.spec)

    def picture(self, example, text):
        """A sentence with its translation, uint8 [h, w, 3]."""
        return TRANSLATION.draw(example, text, self.spec)[0]

    def example(self, text):
        """A sentence, string [], as `predictions` takes it."""
        return {"ids": cut(tf.constant(self.spec.encode(text.numpy().decode()), tf.int32), self.canvas[0])}

    def serve(self, model, ids):
        """The translation of one sentence, int32 [n] of at most the largest length, as ids and its score."""
        lengths = tf.constant(self.data.lengths)

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
        names = ("beams", "alpha", "longer")
        return {
            **{name: getattr(self, name) for name in names},
            "lengths": self.data.lengths,
            "reverse": self.data.reverse,
        }


def _is_real(tokens):
    """float32: 1 for a token, 0 for padding."""
    return tf.cast(tokens != 0, tf.float32)
