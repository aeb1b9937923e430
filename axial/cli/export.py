"""Writes a SavedModel for serving from a run. It takes photos of any size, and its batch norms are folded away.

%s --model_dir=RUN --output_dir=EXPORT
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_string("model_dir", None, "a run of axial-train; its best checkpoint, else its latest.")
flags.DEFINE_string("checkpoint", None, "one checkpoint of that run, by its prefix.")
flags.DEFINE_string("output_dir", None, "folder of the SavedModel; must not exist.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the run's own configuration.")


def _main(_):
    model_dir, output_dir = app.flag("model_dir"), app.flag("output_dir")
    from axial.cli import configuration
    from axial.io.write import try_new_folder
    from axial.serving.export import export

    try_new_folder("output_dir", output_dir)
    task, model = configuration.restore_run(model_dir, FLAGS.checkpoint, bindings=FLAGS.gin_binding)
    print(f"exporting {output_dir}", file=sys.stderr, flush=True)
    export(task, model, output_dir, lambda folder: configuration.save(folder, task.spec))
    print(f"exported {output_dir}")


def main():
    app.run(_main, sys.modules[__name__])
