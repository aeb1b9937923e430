"""Says what is installed, which versions do not go together, which devices are found, and runs one
training step of a tiny model.

%s
"""

import importlib.metadata
import platform
import sys

from axial.cli import app

# What setup.py asks for; the upper bounds are exclusive.
WANTED = {
    "tensorflow": ("2.20", "2.21"),
    "tf_keras": ("2.20", "2.21"),
    "tf-models-official": ("2.20", "2.21"),
    "tensorflow-datasets": ("4.9.10", "5"),
    "gin-config": ("0.5", "0.6"),
    "pycocotools": ("2.0.11", "2.1"),
    "absl-py": ("1.4", "3"),
}
OPTIONAL = ("tensorflow-tpu", "libtpu", "jax", "cloud-tpu-client", "google-cloud-tpu", "keras", "protobuf")


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def problems(versions):
    """Lines on versions that are missing or do not go together.

    Args:
        versions: dict from package names to versions, None where one is not installed.
    """

    def number(text):
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    found = []
    on_tpu = versions.get("tensorflow-tpu")
    for package, (least, below) in WANTED.items():
        version = versions.get(package)
        if package == "tensorflow" and on_tpu:
            version = version or on_tpu
        if version is None:
            found.append(f"{package} is not installed: pip install '{package}>={least},<{below}'")
        elif not number(least) <= number(version) < number(below):
            found.append(f"{package} {version}: wants >={least},<{below}")
    if on_tpu and versions.get("tensorflow"):
        found.append(
            "tensorflow and tensorflow-tpu are both installed and overwrite each other's files: "
            "pip uninstall tensorflow tensorflow-tpu, then install tensorflow-tpu alone"
        )
    libtpu = versions.get("libtpu")
    if on_tpu and libtpu and number(libtpu) > (0, 0, 24):
        found.append(f"libtpu {libtpu}: tensorflow-tpu 2.20 aborts with one newer than 0.0.24")
    protobuf = versions.get("protobuf")
    if protobuf and number(protobuf) < (5,):
        found.append(
            f"protobuf {protobuf} is too old for TensorFlow 2.20; did cloud-tpu-client pull it in? "
            "pip install --no-deps cloud-tpu-client oauth2client, then pip install -U protobuf"
        )
    return found


def _main(_):
    names = [*WANTED, *OPTIONAL]
    versions = {name: version_of(name) for name in names}
    print(f"axial {version_of('axial')}  Python {platform.python_version()}  {platform.machine()}")
    for name, version in versions.items():
        if version or name in WANTED:
            print(f"  {name:22s} {version or '-'}")
    trouble = problems(versions)
    if sys.version_info[:2] < (3, 11):
        trouble.append(f"Python {platform.python_version()}: axial wants 3.11 or newer")
    for line in trouble:
        print(f"  problem: {line}")
    if not versions["tensorflow"] and not versions["tensorflow-tpu"]:
        sys.exit(app.BAD_INPUT)
    import tensorflow as tf

    for kind in ("CPU", "GPU", "TPU"):
        found = tf.config.list_physical_devices(kind)
        if found:
            print(f"  {len(found)} {kind}: {', '.join(device.name for device in found)}")
    print(f"  one training step of a tiny Axial-DeepLab: loss {_step():.3f}")
    print("doctor: " + (f"{len(trouble)} problem(s)" if trouble else "all is well"))
    sys.exit(app.BAD_INPUT if trouble else 0)


def _step():
    """Loss of one training step of the smallest model on the sample photos."""
    import tensorflow as tf

    from axial.data.coco import sample_data_dir
    from axial.tasks.panoptic import PanopticTask
    from axial.training.optimizers import RAdamLookahead

    task = PanopticTask("axial_deeplab_nano", sample_data_dir(), "train2017", "val2017", (65, 65))
    model = task.build_model()
    optimizer = RAdamLookahead()
    with tf.GradientTape() as tape:
        loss = task.losses(model, next(iter(task.train_dataset(2, seed=0))))["total"]
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return float(loss)


def main():
    app.run(_main, sys.modules[__name__])
