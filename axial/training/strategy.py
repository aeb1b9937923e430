"""The devices and the precision of a training or an evaluation."""

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError, nearest

STRATEGIES = ("default", "mirrored", "tpu")
PRECISIONS = ("float32", "mixed_bfloat16")


def make_strategy(name="default", tpu="local"):
    """A `tf.distribute` strategy.

    Args:
        name: 'default' is one device: the first GPU, or the CPU if there is no GPU. 'mirrored' is all GPUs of this
            machine or, if it has no GPU, its logical CPUs, at least two. 'tpu' is a TPU.
        tpu: 'local' for a TPU VM, otherwise the name or address of a TPU.

    Raises:
        InputError: no such device, or an unknown name.
    """
    if name == "default":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        gpus = tf.config.list_logical_devices("GPU")
        devices = gpus or tf.config.list_logical_devices("CPU")
        if not gpus and len(devices) < 2:
            raise InputError("--strategy=mirrored: no GPU was found; --strategy=default needs none")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    if name == "tpu":
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
            if tpu not in ("", "local"):
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except Exception as error:  # the runtime raises anything from ValueError to NotFoundError
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"--strategy=tpu --tpu={tpu}: no TPU was found ({reason[:200]})") from None
        return tf.distribute.TPUStrategy(resolver)
    raise InputError(f"--strategy={name}: unknown{nearest(name, STRATEGIES)}: {', '.join(STRATEGIES)}")


def set_precision(name):
    """Makes `name` the precision policy of all layers that are made from now on.

    Raises:
        InputError: a name other than 'float32' and 'mixed_bfloat16'.
    """
    if name not in PRECISIONS:
        raise InputError(f"precision {name!r} is unknown{nearest(name, PRECISIONS)}: {', '.join(PRECISIONS)}")
    keras.mixed_precision.set_global_policy(name)
