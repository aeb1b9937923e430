"""Exports of trained models. A SavedModel takes photos of any size."""

import functools
import os

import tensorflow as tf
import tf_keras as keras

from axial.data.decode import decode, orientation, turn
from axial.errors import InputError
from axial.io.read import first_line
from axial.io.write import folder_digests, new_folder, write_json
from axial.serving.fold import fold
from axial.weights.card import PAGE

SPEC = os.path.join("assets.extra", "spec.json")
HASHES = os.path.join("assets.extra", "hashes.json")  # SHA-256 of every other file of an export but its card


class Server(tf.Module):
    """The signatures of an export for photos.

    'serving_default' takes an encoded photo, string [], and turns it upright as its EXIF tag says. What it cannot
    decode as axial-predict does, it refuses; see `decode`. 'image' takes pixels, uint8 [h, w, 3]. Both return what the
    task serves. h x w is the size of the upright photo, and K is the largest number of instances. Of panoptic
    segmentation:

        panoptic     int32 [h, w], class x label_divisor + instance
        semantic     int32 [h, w], class
        instance     int32 [h, w], 0 for none, i for the i-th row of score
        score        float32 [K]

    Of classification:

        probability  float32 [C], of every class
        class        string [5], names of the most probable classes, or of all if there are fewer
        score        float32 [5], their probabilities

    Of detection, with K rows of which the first `count` are objects, the best first:

        box          float32 [K, 4], x, y, width and height in pixels
        class        int32 [K], class
        score        float32 [K]
        count        int32 []
        mask         float32 [K, 28, 28], probabilities on the box, if the model has masks

    'classes' takes nothing. It returns class_names [C], colors uint8 [C, 3], things [C], category_ids [C],
    label_divisor, ignore, the canvas (height, width), and kind, the name of the task's `Evaluation`: 'panoptic',
    'classification' or 'detection'. Where photos keep their own scale it also returns photo_scale, the factor that each
    is scaled by; a photo then has to fit the canvas, and others are refused. `Predictor` cuts those into tiles and
    joins the results, for which there are tile_overlap, instances, stuff_area and thing_area, those of the run's
    configuration.

    Args:
        task: task with `serve`.
        model: its folded model.
    """

    def __init__(self, task, model):
        super().__init__()
        self.weights = model.weights  # and not the model, with which TensorFlow would store a graph of every layer
        self._task = task
        self._serve = functools.partial(task.serve, model)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, 3], tf.uint8, "image")])
    def image(self, image):
        return self._serve(image)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string, "encoded")])
    def encoded(self, encoded):
        return self.image(turn(decode(encoded), orientation(encoded)))

    @tf.function(autograph=False, input_signature=[])
    def classes(self):
        spec, scale = self._task.spec, self._task.photo_scale
        return {
            "class_names": tf.constant(spec.class_names),
            "colors": tf.constant(spec.colors),
            "things": tf.constant(spec.things),
            "category_ids": tf.constant(spec.category_ids, tf.int32),
            "label_divisor": tf.constant(spec.label_divisor),
            "ignore": tf.constant(spec.ignore),
            "canvas": tf.constant(self._task.canvas),
            "kind": tf.constant(self._task.evaluation.name),
            **({} if scale is None else self._scaled()),
        }

    def _scaled(self):
        """What joining the tiles of a photo takes."""
        task = self._task
        return {
            "photo_scale": tf.constant(task.data.photo_scale),
            "tile_overlap": tf.constant(task.canvases.overlap),
            "instances": tf.constant(task.instances),
            "stuff_area": tf.constant(task.grouping.stuff_area),
            "thing_area": tf.constant(task.grouping.thing_area),
        }

    def signatures(self):
        return {"serving_default": self.encoded, "image": self.image, "classes": self.classes}


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


def text_operations():
    """The module tensorflow_text, whose operations a translator's export has. Raises InputError if it is missing."""
    try:
        import tensorflow_text
    except (ImportError, tf.errors.OpError) as error:
        raise InputError(f"a translator's export needs pip install tensorflow-text ({first_line(error)})") from None
    return tensorflow_text


SERVERS = {"photo": Server, "text": TextServer}  # by what the task takes


def write_saved_model(task, folded, folder):
    """Writes the SavedModel of a folded model."""
    server = SERVERS[task.evaluation.takes](task, folded)
    tf.saved_model.save(server, folder, server.signatures())


def export(task, model, path, *, write=write_saved_model, extra=None, check=None):
    """Writes an export of a trained model. The folder appears only when it is complete and checked.

    Args:
        task: the task.
        model: its trained model.
        path: folder that does not exist yet.
        write: function of (task, folded model, folder) that writes the network.
        extra: function that writes further files into the folder that it is given, the export's assets.extra.
        check: function of the folder, before it gets its name; if it raises, no export is left. It may add the card.

    Raises:
        InputError: `path` exists.
    """
    with new_folder(path, SPEC) as folder:
        write(task, folded_model(task, model), folder)
        write_json(os.path.join(folder, SPEC), task.spec.to_json())
        if extra:
            extra(os.path.join(folder, "assets.extra"))
        write_json(os.path.join(folder, HASHES), folder_digests(folder, leave=(PAGE,)))
        if check:
            check(folder)


def folded_model(task, model):
    """`fold` in float32, whatever the precision of the training."""
    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("float32")
    try:
        return fold(task, model)
    finally:
        keras.mixed_precision.set_global_policy(policy)
