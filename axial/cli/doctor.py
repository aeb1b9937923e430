"""Prints the installed versions, the TPU software of this machine, its devices, and the versions that do not fit
together.

%s
%s --step          also runs one training step of a tiny model
"""

import contextlib
import importlib.metadata
import platform
import sys

from axial.cli import app
from axial.cli.flags import Flag, Flags
from axial.errors import DISTRIBUTION, InputError
from axial.io.show import say, working

OPTIONAL = ("tensorflow-tpu", "libtpu", "jax", "cloud-tpu-client", "keras", "protobuf")


def version_of(package):
    """The installed version of a package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def requirements():
    """dict from package names to the `SpecifierSet`s that the installed axial requires.

    Raises:
        InputError: axial is not installed.
    """
    from packaging.requirements import Requirement

    try:
        required = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"{DISTRIBUTION} is not installed, so its requirements are unknown: pip install .") from None
    return {r.name: r.specifier for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}


def problems(versions, required):
    """One line for each package that is missing or has a wrong version.

    Args:
        versions: dict from package names to versions; None for a package that is not installed.
        required: result of `requirements`.
    """
    from packaging.version import Version

    lines, on_tpu = [], versions.get("tensorflow-tpu")
    for package, specifier in required.items():
        version = versions.get(package) or (on_tpu if package == "tensorflow" else None)
        if version is None:
            lines.append(f"{package} is not installed: pip install '{package}{specifier}'")
        elif not specifier.contains(version, prereleases=True):
            lines.append(f"{package} {version}: axial needs {specifier}")
    if on_tpu and versions.get("tensorflow"):
        remedy = "pip uninstall tensorflow tensorflow-tpu, then install tensorflow-tpu alone"
        lines.append(f"tensorflow and tensorflow-tpu are both installed and overwrite each other's files: {remedy}")
    libtpu = versions.get("libtpu")
    # libtpu 2.18.0 is older than 0.0.24, although its number is higher.
    if on_tpu and libtpu and Version("0.0.24") < Version(libtpu) < Version("1"):
        lines.append(f"libtpu {libtpu}: tensorflow-tpu 2.20 aborts with one newer than 0.0.24")
    protobuf = versions.get("protobuf")
    if protobuf and Version(protobuf) < Version("5"):
        lines.append(f"protobuf {protobuf} is too old for TensorFlow 2.20: pip install -U protobuf")
    return lines


def image_problems(environment, tensorflow):
    """One line for each mismatch between a TPU VM's image, its accelerator and its TensorFlow.

    Args:
        environment: result of `tpu_environment`.
        tensorflow: the installed version of TensorFlow, or None.
    """
    from axial import slices

    lines = []
    image = environment.get("RUNTIME_VERSION", "")
    version = slices.tensorflow_of(image)
    if version and tensorflow and tuple(map(int, tensorflow.split(".")[:2])) != version[:2]:
        needed = f"whose TPU runtime is for {'.'.join(map(str, version))}"
        remedy = "install the image's version, or take an image without TensorFlow"
        lines.append(f"TensorFlow {tensorflow} is installed on {image}, {needed}: {remedy}")
    try:
        if image:
            slices.check_runtime(slices.find_slice(environment.get("ACCELERATOR_TYPE", "")), image)
    except InputError as error:
        lines.append(str(error).replace("--runtime=", "image ").replace("--slice=", "accelerator "))
    return lines


class Doctor(Flags):
    step = Flag(bool, "also runs one training step of a tiny model, about 10 seconds on a CPU.", False)


def _main(given):
    from axial.io.metadata import tpu_environment

    required = requirements()
    versions = {name: version_of(name) for name in (*required, *OPTIONAL)}
    say(f"axial {version_of(DISTRIBUTION)}  Python {platform.python_version()}  {platform.machine()}")
    for name, version in versions.items():
        if version or name in required:
            say(f"  {name:22s} {version or '-'}")
    environment = tpu_environment()
    if image := environment.get("RUNTIME_VERSION"):
        accelerator, worker = environment.get("ACCELERATOR_TYPE", "?"), environment.get("WORKER_ID", "?")
        say(f"  TPU VM: {accelerator}, worker {worker}, software {image}")
    else:
        say("  not a TPU VM, or its metadata server does not answer")
    trouble = problems(versions, required)
    trouble += image_problems(environment, versions["tensorflow"] or versions["tensorflow-tpu"])
    for line in trouble:
        say(f"  problem: {line}")
    if not versions["tensorflow"] and not versions["tensorflow-tpu"]:
        sys.exit(app.BAD_INPUT)
    import tensorflow as tf

    for kind in ("CPU", "GPU", "TPU"):
        if devices := tf.config.list_physical_devices(kind):
            say(f"  {len(devices)} {kind}: {', '.join(device.name for device in devices)}")
    xla = any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU"))
    say(f"  axial-train: XLA {'compiles the step' if xla else 'does not compile the step; see docs/train.md'}")
    if given.step:
        with working("training a tiny Axial-DeepLab for one step: about 10 seconds on a CPU"):
            loss = _step()
        say(f"  one training step of a tiny Axial-DeepLab: loss {loss:.3f}")
    say("doctor: " + (f"{len(trouble)} problem(s)" if trouble else "all is well"))
    sys.exit(app.BAD_INPUT if trouble else 0)


def _step():
    """Runs a training step of a tiny model on the sample photos, and returns its loss."""
    import tensorflow as tf

    from axial.cli.analyze import build_recipe

    task, _, optimizer = build_recipe(["sample/overfit.gin", "tiny/panoptic.gin"], (), None)
    model = task.build_model()
    with tf.GradientTape() as tape:
        loss = task.losses(model, next(iter(task.train_dataset(2, seed=0))))["total"]
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.build(model.trainable_variables).apply(gradients, model.trainable_variables)
    return float(loss)


def main():
    app.run({"": (Doctor, _main)})
