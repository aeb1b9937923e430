"""The signatures of a translator's export."""

import functools

import tensorflow as tf

from axial.data.specs import text_operations


class TextServer(tf.Module):
    """The signatures of a translator's export. Loading it needs `import tensorflow_text`, which has its operations.

    'serving_default', also called 'text', takes texts, string [N], one sentence each. It returns 'translation', string
    [N], and 'score', float32 [N], the log probability by its length penalty. The sentences are translated one after the
    other; longer ones than the canvas are cut to it. 'classes' takes nothing. It returns the canvas, (most tokens,),
    the two languages, and the name of the task's `Evaluation`.

    Args:
        task: task with `serve`.
        model: its model.
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
            "kind": tf.constant(self._task.evaluation.name),
        }

    def signatures(self):
        return {"serving_default": self.text, "text": self.text, "classes": self.classes}
