"""TensorFlow's server on a worker of a slice whose image has none.

The trainer on the first worker reaches every worker's chips through these servers, by --tpu=grpc://ADDRESS:8470,... The
images tpu-vm-tf-x.y.z-pod-pjrt of the Cloud TPU API start such a server themselves.

    python3 -m axial.cloud.server --port=8470
"""

from absl import app, flags

from axial.cloud.backend import GRPC_PORT
from axial.io.show import say

FLAGS = flags.FLAGS


def _main(_):
    import tensorflow as tf

    address = f"{FLAGS.address}:{FLAGS.port}"
    # A cluster of this task alone: the trainer tells all servers of each other when it connects.
    server = tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0, protocol="grpc")
    say(f"TensorFlow {tf.__version__} listens on {address}")
    server.join()


if __name__ == "__main__":
    flags.DEFINE_string("address", "0.0.0.0", "address to listen on.")
    flags.DEFINE_integer("port", GRPC_PORT, "port to listen on.")
    app.run(_main)
