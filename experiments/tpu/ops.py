"""Names the operations of recipes' training steps that TensorFlow has no TPU kernel for.

%s                          every published recipe, on an installation with tensorflow-tpu (scripts/tpu/install.sh)
%s --only=axial_deeplab_s   those with this in their names

A step is compiled for a TPU from its graph. Each operation needs a kernel of the device type `TPU` that takes the
operation's types of tensors. tensorflow-tpu, and the TensorFlow of TPU images, have these kernels on any machine.
"""

import collections
import os
import sys

if __name__ == "__main__":  # the list of kernels needs no chip, and a training may hold them
    os.environ.setdefault("TPU_LOAD_LIBRARY", "0")
import tensorflow as tf
from absl import flags
from tensorflow.python.framework import kernels
from tensorflow.python.util import pywrap_xla_ops

import tpu_compile
import tpu_table
from axial.cli import app
from axial.errors import InputError
from axial.io.show import counted, say, working
from axial.statements import experiments_dir

FLAGS = flags.FLAGS

TPU = "XLA_TPU_JIT"
PALLAS = "XlaCallModule"  # calls what jax has lowered


def trace(function, specs):
    """`GraphDef` of a function of tensors, traced as on a machine with a TPU."""
    with tpu_compile.as_on_tpu():
        traced = tf.function(lambda *tensors: function(*tf.nest.pack_sequence_as(specs, tensors)), autograph=False)
        return traced.get_concrete_function(*tf.nest.flatten(specs)).graph.as_graph_def()


def registered(device=TPU):
    """dict from operations to the kernels that a device type has of them.

    Raises:
        InputError: this TensorFlow has none.
    """
    pywrap_xla_ops.get_cpu_kernel_names()  # only then does TensorFlow register the kernels of XLA's device types
    found = collections.defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type == device:
            found[kernel.op].append(kernel)
    if not found:
        raise InputError(
            f"TensorFlow {tf.__version__} as installed here has no TPU kernels: use an installation by "
            "scripts/tpu/install.sh, with tensorflow-tpu"
        )
    return found


def check(graph, of_device):
    """(counts of the operations of a graph and of the functions that it calls, those without a kernel).

    Args:
        graph: `GraphDef`.
        of_device: result of `registered`.

    Returns:
        (`collections.Counter` of kinds; dict from operations such as 'Unique of int32, int64' to names of their nodes).
    """
    missing = collections.defaultdict(list)
    nodes = [node for node in _reached(graph) if node.op != "Placeholder"]  # inputs and variables
    for node in nodes:
        if not any(_serves(kernel, node) for kernel in of_device.get(node.op, ())):
            types = sorted(tf.as_dtype(number).name for attr in node.attr.values() for number in _types(attr))
            missing[f"{node.op} of {', '.join(dict.fromkeys(types))}" if types else node.op].append(node.name)
    return collections.Counter(node.op for node in nodes), dict(sorted(missing.items()))


def _reached(graph):
    """The nodes of a graph and of the functions that it calls, without the nodes that call a function by its name."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    seen, waiting = set(), [graph.node]
    while waiting:
        for node in waiting.pop():
            named = [attr.func.name for attr in node.attr.values()]
            named += [function.name for attr in node.attr.values() for function in attr.list.func]
            for name in {node.op, *named} & bodies.keys() - seen:
                seen.add(name)
                waiting.append(bodies[name])
            if node.op not in bodies:
                yield node


def _types(attr):
    return {attr.type} - {0} | set(attr.list.type)


def _serves(kernel, node):
    """Whether a kernel takes the types of a node."""
    limits = [limit for limit in kernel.constraint if limit.name in node.attr]
    return all(_types(node.attr[limit.name]) <= set(limit.allowed_values.list.type) for limit in limits)


def _main(_):
    registered()  # refuses another installation before the slow tracing
    every = []
    for leaf in tpu_table.named(tpu_table.leaves(experiments_dir()), FLAGS.only):
        for form in tpu_table.FORMS:
            with working(f"{leaf}, {form}: tracing a training step"):
                counts, missing = tpu_compile.alone(operations_of, leaf, form)
            kinds = f"{counts.total()} operations of {len(counts)} kinds"
            say(f"{leaf}, {form}: {kinds}, {counts[PALLAS]} calls of Pallas kernels")
            for kind, nodes in missing.items():
                say(f"  no TPU kernel: {kind}, {counted(len(nodes), 'time')}, the first in {nodes[0]}")
            every.append(bool(missing))
            if not counts[PALLAS]:
                break  # without kernels it is the same step
    lacking = f"{sum(every)} with operations without a TPU kernel"
    say(f"training steps: {len(every)}; {lacking if any(every) else 'every operation has a TPU kernel'}")
    sys.exit(int(any(every)))


def operations_of(leaf, form):
    """`check` of a training step of a published recipe."""
    replicas = tpu_table.cores(leaf)
    with tpu_table.recipe_of(leaf, form) as build:
        batch = max(build()[1].batch // replicas, 1)
        return check(trace(*tpu_table.training_step(build, batch, replicas, tpu_compile.DEFAULT_SLICE)), registered())


if __name__ == "__main__":  # who imports this has flags of its own
    flags.DEFINE_string("only", "", "recipes whose names have this text.")
    app.run(_main, sys.modules[__name__])
