"""Looks into models without training them.

%s models               every registered model with its parameters
%s model NAME           parameters of each part of one model
%s benchmark --json=F   our form against the textbook's and ResNet-101, on this machine
%s scaling --figure=F   time and memory of attention over image size and span
%s input                images a second of each stage of the input pipeline
%s tpu --gin_file=coco/axial_deeplab_s.gin --slice=v5e:4x4
                        memory and estimated cycles of a recipe's step, by the TPU's own compiler
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_integer("classes", 19, "classes of the semantic head; the paper counts Cityscapes' 19.")
if __name__ != "__main__":
    flags.DEFINE_string("json", None, "benchmark, scaling, input: also writes every number there.")
    flags.DEFINE_bool("quick", False, "benchmark, scaling, input: fewer works and rounds.")
    flags.DEFINE_string("figure", None, "scaling: the picture to write, .png or .pdf.")
    flags.DEFINE_multi_string("gin_file", ["sample/overfit.gin"], "tpu, input: the recipe.")
    flags.DEFINE_multi_string("gin_binding", [], "tpu, input: gin bindings over the recipe.")
    flags.DEFINE_string("data_dir", None, "tpu, input: what axial-convert wrote; the sample photos by default.")
    flags.DEFINE_string("slice", "v5e:1x1", "tpu: the slice, like v5e:4x4.")
    flags.DEFINE_integer("batch", None, "tpu: images of a device; by default the largest batch that fits.")
    flags.DEFINE_enum("mode", "train", ["train", "serve"], "tpu: the step that is compiled.")


def _main(arguments):
    from axial.errors import InputError, nearest

    verbs = {
        "models": _models,
        "benchmark": _benchmark,
        "scaling": _scaling,
        "input": _input,
        "tpu": _tpu,
    }
    if len(arguments) == 1 and arguments[0] in verbs:
        return verbs[arguments[0]]()
    if len(arguments) == 2 and arguments[0] == "model":
        return _model(arguments[1])
    if arguments[:1] == ["model"]:
        raise InputError("model takes one name; see axial-analyze models")
    known = nearest(arguments[0], ("model", *verbs)) if arguments else ""
    raise InputError(f"give {', '.join(repr(verb) for verb in verbs)} or 'model NAME'{known}")


def _count(name):
    from axial.analysis.counts import abstract_model, count_parameters

    return count_parameters(abstract_model(name, FLAGS.classes))


def _models():
    from rich.console import Console
    from rich.table import Table

    from axial.models.registry import VARIANTS

    table = Table("model", "parameters", "attention batch norms")
    for name in VARIANTS:
        counts = _count(name)
        table.add_row(name, f"{counts.counted / 1e6:.3f} M", f"{counts.attention_norms / 1e6:.3f} M")
    Console().print(table)


def _model(name):
    from rich.console import Console
    from rich.table import Table

    counts = _count(name)
    table = Table("part", "parameters")
    for part, number in counts.parts.items():
        table.add_row(part, f"{number:,}")
    table.add_section()
    table.add_row("all", f"{counts.counted:,}")
    table.add_row("attention batch norms, apart", f"{counts.attention_norms:,}")
    Console().print(table)


def _finish(result):
    """Writes --json, if it was asked for."""
    from axial.data.tfrecord import write_json

    if FLAGS.json:
        write_json(FLAGS.json, result)


def _say(line):
    print(line, file=sys.stderr, flush=True)


def _benchmark():
    from rich.console import Console
    from rich.table import Table

    from axial.analysis.benchmark import benchmark

    result = benchmark(FLAGS.quick, _say)
    table = Table("work", "form", "median s", "quartiles", "peak GB", title=str(result["machine"]))
    for work, forms in result["works"].items():
        for form, measure in forms.items():
            quartiles = " - ".join(f"{s:.4f}" for s in measure["quartiles_s"])
            peak = f"{measure['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in measure else ""
            table.add_row(work, form, f"{measure['median_s']:.4f}", quartiles, peak)
    console = Console()
    console.print(table)
    for key, value in result["ratios"].items():
        console.print(f"{key}: {value:.2f}")
    published = ", ".join(f"{name} {ms} ms" for name, ms in result["published_v100_ms"].items())
    console.print(f"published, V100, batch 1 (Table 8): {published}")
    _finish({**result, **result["ratios"]})


def _scaling():
    from axial.analysis.scaling import draw, measure

    result = measure(FLAGS.quick, _say)
    for row in result:
        print(
            f"{row['size']:5d} px  span {row['span'] or 'whole':>5}  {row['seconds']:8.3f} s  "
            f"{row['peak_bytes'] / 1e6:8.0f} MB  {1e9 * row['seconds'] / row['pixels']:7.1f} ns/pixel"
        )
    if FLAGS.figure:
        draw(result, FLAGS.figure)
    _finish(result)


def _recipe():
    """(task, training, optimizer) of the gin flags."""
    from axial.cli import configuration
    from axial.data.coco import sample_data_dir

    configuration.load(FLAGS.gin_file, FLAGS.gin_binding)
    return configuration.build(FLAGS.data_dir or sample_data_dir())


def _input():
    from axial.analysis.input_speed import measure

    result = measure(_recipe()[0], FLAGS.quick)
    for stage, speed in result.items():
        print(f"{stage:32s} {speed:10.1f} images/s")
    _finish(result)


def _tpu():
    from axial.analysis import tpu_compile

    replicas = tpu_compile.replicas_of(FLAGS.slice)
    programs = {}

    def compiled(batch):
        if batch not in programs:
            _say(f"{FLAGS.slice}, {batch} images a device: compiling")
            step, specs = _serving_step(batch) if FLAGS.mode == "serve" else _training_step(batch, replicas)
            programs[batch] = tpu_compile.compile_for(tpu_compile.lower(step, specs), FLAGS.slice)
        return programs[batch]

    batch = FLAGS.batch or tpu_compile.largest_batch(lambda batch: compiled(batch).fits)
    program = compiled(batch or 1)
    gib = lambda size: f"{size / 2**30:.2f} GiB"
    if not program.fits:
        print(
            f"{batch or 1} images a device do not fit: {gib(program.used)} of {gib(program.limit)}, "
            f"{gib(program.used - program.limit)} too much; try a smaller --batch, "
            "--gin_binding=\"TrainingConfig.precision = 'mixed_bfloat16'\", a model with "
            "memory='recompute_block', or a generation with more memory"
        )
        sys.exit(1)
    largest = "" if FLAGS.batch else ", the largest batch that fits"
    limit = next((gib(p.limit) for p in programs.values() if p.limit), None) or tpu_compile.usable(FLAGS.slice)
    print(f"{FLAGS.slice}: {replicas} devices, {batch} images each{largest}; {FLAGS.mode}")
    print(f"memory {gib(program.used)} of {limit}")
    print(f"estimated cycles {program.cycles / 1e6:.2f} M; padding {program.padding:.0%} of the results' bytes")
    for title, cycles in (("operation", program.by_op), ("part", program.by_part)):
        for name, count in list(cycles.items())[:12]:
            print(f"  {title:10s} {name:28s} {count / 1e6:10.2f} M  {count / max(program.cycles, 1):5.1%}")
    print(f"no TPU kernel: {', '.join(program.custom_calls) or 'none'}")


def _training_step(batch, replicas):
    """(function, specs) of what a replica of axial-train does with `batch` images."""
    from axial.analysis.tpu_compile import SliceStrategy
    from axial.training.strategy import set_precision
    from axial.training.trainer import Loop

    strategy = SliceStrategy(replicas)
    with strategy.scope():
        task, training, optimizer = _recipe()
        set_precision(training.precision)
        model = task.build_model()
        optimizer.build(model.trainable_variables)
        loop = Loop(task, model, optimizer, training, strategy)
    spec = task.train_dataset(batch, training.seed).element_spec
    return lambda batch: strategy.run(loop.replica_step, (batch,)), [spec]


def _serving_step(batch):
    """(function, specs) of an exported model: canvases in, panoptic maps out."""
    import tensorflow as tf

    from axial.serving.fold import fold

    task = _recipe()[0]
    folded = fold(task, task.build_model())
    return lambda x: task.predict(folded, x), [tf.TensorSpec([batch, *task.canvas, 3])]


def main():
    app.run(_main, sys.modules[__name__])
