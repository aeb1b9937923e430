"""Images a second of each stage of the input pipeline alone, of the whole pipeline, and of a model in training."""

import time

import tensorflow as tf

from axial.data import tfrecord
from axial.data.pipeline import segment_map, training_example
from axial.data.streams import decode_photo


def _speed(dataset, images, seconds):
    """Images a second of a dataset whose elements have `images` each. Measured for about `seconds` after a warm-up."""

    @tf.function(autograph=False)
    def consume(iterator, count):
        def read(i):
            element = iterator.get_next()
            with tf.control_dependencies(tf.nest.flatten(element)):
                return (i + 1,)

        return tf.while_loop(lambda i: i < count, read, (0,))

    iterator = iter(dataset)
    consume(iterator, tf.constant(4))
    count, taken = 4, 0.0
    while taken < seconds:
        started = time.perf_counter()
        consume(iterator, tf.constant(count))
        taken, done = time.perf_counter() - started, count
        count *= 2
    return images * done / taken


def measure(task, quick=False, batch=8):
    """dict of images a second of each stage alone, on one thread, with its input in memory.

    'pipeline' is all stages together, as training runs them, on all threads. 'model' is a training step of the task's
    model on a batch in memory. 'pipeline / model' is the number of such models that the pipeline could feed.
    """
    seconds = 0.5 if quick else 3.0
    manifest = tfrecord.read_manifest(task.data_dir, task.data.train_split)
    files = tfrecord.shard_paths(task.data_dir, manifest)
    serialized = list(tf.data.TFRecordDataset(files).take(16))
    in_memory = tf.data.Dataset.from_tensor_slices(serialized)
    records = in_memory.map(tfrecord.parse_example).cache().repeat()
    seed = tf.constant([0, 1], tf.int64)

    def example(r):
        return training_example(r, seed, task.spec, task.data, instances=task.instances)

    found = {
        "read": _speed(tf.data.TFRecordDataset(files).repeat(), 1, seconds),
        "parse": _speed(in_memory.repeat().map(tfrecord.parse_example), 1, seconds),
        "decode photo": _speed(records.map(decode_photo), 1, seconds),
        "decode segments": _speed(records.map(segment_map), 1, seconds),
        "decode, augment, targets": _speed(records.map(example), 1, seconds),
        "pipeline": _speed(task.train_dataset(batch, 0), batch, seconds),
        "model": _model_speed(task, batch, seconds),
    }
    found["pipeline / model"] = found["pipeline"] / found["model"]
    return found


def _model_speed(task, batch, seconds):
    model = task.build_model()
    images = next(iter(task.train_dataset(batch, 0)))

    @tf.function(autograph=False)
    def step(images):
        with tf.GradientTape() as tape:
            loss = task.losses(model, images)["total"]
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, [tf.convert_to_tensor(g) for g in gradients]

    step(images)
    started, done = time.perf_counter(), 0
    while done < 2 or time.perf_counter() - started < seconds:
        step(images)[0].numpy()
        done += 1
    return batch * done / (time.perf_counter() - started)
