"""Which kind of device will run the graph that is being traced."""

import tensorflow as tf


def on_cpu():
    """True where there is no accelerator. Some operations have one form for CPUs and one for accelerators."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def on_tpu():
    """True in a graph on a machine with a TPU. Eager code runs on the TPU's host and does not count."""
    return not tf.executing_eagerly() and bool(tf.config.list_logical_devices("TPU"))
