"""What will run the graph that is being traced."""

import tensorflow as tf


def on_processor():
    """Whether it is a processor, and no accelerator: some things are written in two ways."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def on_tpu():
    """Whether it is a TPU: what is eager runs on its host."""
    return not tf.executing_eagerly() and bool(tf.config.list_logical_devices("TPU"))
