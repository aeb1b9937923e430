"""Runs TensorFlow's server on a host whose image starts none: python3 -m axial.cloud.server --listen=all --port=8470

Through these servers, the trainer on the first host reaches every host's chips, by --tpu=grpc://ADDRESS:8470,...
"""

import sys

from absl import app, flags

from axial.cloud.runs import SERVER_PORT
from axial.errors import InputError
from axial.io.loopback import keep_local
from axial.io.show import say

FLAGS = flags.FLAGS


def _main(_):
    import tensorflow as tf

    # A cluster with only this task: the trainer connects later, and gives each server the addresses of the others.
    cluster = {"worker": [f"localhost:{FLAGS.port}"]}
    server = tf.distribute.Server(cluster, job_name="worker", task_index=0, protocol="grpc", start=False)
    if FLAGS.listen == "loopback":
        try:
            keep_local(FLAGS.port)
        except InputError as error:
            say(f"axial.cloud.server: {error}", error=True)
            sys.exit(2)
    server.start()
    where = "all addresses" if FLAGS.listen == "all" else "loopback"
    say(f"TensorFlow {tf.__version__} listens on {where}, port {FLAGS.port}")
    server.join()


if __name__ == "__main__":
    flags.DEFINE_enum("listen", "loopback", ["loopback", "all"], "who reaches it; it has no authentication.")
    flags.DEFINE_integer("port", SERVER_PORT, "port to listen on.")
    app.run(_main)
