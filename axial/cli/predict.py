"""Segments photos with a SavedModel or a run: a picture and a JSON of the segments for each.

%s --saved_model=EXPORT --output_dir=OUT photo.jpg ...
%s --model_dir=RUN --scales=0.5,0.75,1,1.25,1.5 --flip --output_dir=OUT photo.jpg ...

An export looks at a photo once; averaging over scales and mirror images takes the run itself.
"""

import os
import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_string("saved_model", None, "what axial-export wrote.")
flags.DEFINE_string("model_dir", None, "a run of axial-train, in place of an export; its best checkpoint.")
flags.DEFINE_list("scales", ["1"], "scales of the canvas to average over; needs --model_dir.")
flags.DEFINE_bool("flip", False, "averages over the mirror image as well; needs --model_dir.")
flags.DEFINE_string("output_dir", ".", "folder for PHOTO.panoptic.png and PHOTO.json.")


def _main(photos):
    from axial.errors import InputError

    if bool(FLAGS.saved_model) == bool(FLAGS.model_dir):
        raise InputError(
            "one of --saved_model and --model_dir is needed; to get one: axial-train --model_dir=RUN, then "
            "axial-export --model_dir=RUN --output_dir=EXPORT"
        )
    if FLAGS.saved_model and (FLAGS.flip or FLAGS.scales != ["1"]):
        raise InputError("--scales and --flip need --model_dir: an export looks at a photo once")
    scales = app.positive_numbers("scales", FLAGS.scales)
    if not photos:
        raise InputError("name at least one photo")
    for photo in photos:
        if not os.path.isfile(photo):
            raise InputError(f"{photo}: no such photo")
    import json

    from PIL import Image

    from axial.data import tfrecord
    from axial.drawing import overlay
    from axial.evaluation.panoptic import segment_table
    from axial.serving.predictor import Predictor, RunPredictor, load_photo, segments_json

    if FLAGS.saved_model:
        predictor = Predictor(FLAGS.saved_model)
    else:
        from axial.cli.configuration import restore_run

        predictor = RunPredictor(*restore_run(FLAGS.model_dir), scales, FLAGS.flip)
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    for photo in photos:
        image = load_photo(photo)
        table = segment_table(predictor(image), predictor.spec)
        stem = os.path.join(FLAGS.output_dir, os.path.splitext(os.path.basename(photo))[0])
        picture = Image.fromarray(overlay(image, table[0], table[1], predictor.spec))
        tfrecord.write_whole(f"{stem}.panoptic.png", lambda path: picture.save(path, "PNG"))
        segments = segments_json(table, predictor.spec)
        content = {"photo": photo, "height": image.shape[0], "width": image.shape[1], "segments": segments}
        tfrecord.write_text(f"{stem}.json", json.dumps(content, indent=1) + "\n")
        found = ", ".join(s["class"] for s in sorted(segments, key=lambda s: -s["area"])[:6])
        print(f"{photo} -> {stem}.panoptic.png, {stem}.json: {len(segments)} segments: {found}")


def main():
    app.run(_main, sys.modules[__name__])
