"""Segments or classifies photos, or finds objects, with a SavedModel or a run: a JSON for each, and a picture.

%s --saved_model=EXPORT --output_dir=OUT photo.jpg ...
%s --saved_model=EXPORT --output_dir=OUT FOLDER
%s --model_dir=RUN --multi_scale --output_dir=OUT photo.jpg ...

An export sees a photo at one scale. To average over scales and mirror images, use the run itself.
"""

import json
import os
import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_string("saved_model", None, "what axial-export wrote.")
flags.DEFINE_string("model_dir", None, "a run of axial-train, in place of an export; its best checkpoint.")
flags.DEFINE_list("scales", ["1"], "scales of the canvas to average over; needs --model_dir.")
flags.DEFINE_bool("flip", False, "averages over the mirror image as well; needs --model_dir.")
flags.DEFINE_bool("multi_scale", False, "the recipe's own scales, and --flip; needs --model_dir.")
flags.DEFINE_string("output_dir", ".", "folder for PHOTO.json, and PHOTO.panoptic.png or PHOTO.boxes.png.")


def _main(arguments):
    from axial.errors import InputError

    if bool(FLAGS.saved_model) == bool(FLAGS.model_dir):
        raise InputError(
            "one of --saved_model and --model_dir is needed; to get one: axial-train --model_dir=RUN, then "
            "axial-export --model_dir=RUN --output_dir=EXPORT"
        )
    if FLAGS.saved_model and (FLAGS.flip or FLAGS.multi_scale or FLAGS.scales != ["1"]):
        raise InputError("--scales, --flip and --multi_scale need --model_dir: an export sees a photo at one scale")
    scales = app.positive_numbers("scales", FLAGS.scales)
    names = output_names(find_photos(arguments))
    from PIL import Image

    from axial.cli import configuration
    from axial.io.write import write_text, write_whole
    from axial.serving.predictor import RunPredictor, load_photo

    app.silence_xla()
    if FLAGS.saved_model:
        predictor = configuration.load_export(FLAGS.saved_model)
    else:
        task, model = configuration.restore_run(FLAGS.model_dir)
        looks = (task.multi_scale, True) if FLAGS.multi_scale else (scales, FLAGS.flip)
        predictor = RunPredictor(task, model, *looks)
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    for photo, name in names.items():
        image = load_photo(photo)
        pictures, content, summary = predictor.kind.describe(image, predictor(image), predictor.spec)
        stem = os.path.join(FLAGS.output_dir, name)
        for suffix, pixels in pictures.items():
            picture = Image.fromarray(pixels)
            write_whole(f"{stem}.{suffix}", lambda path, picture=picture: picture.save(path, "PNG"))
        content = {"photo": photo, "height": image.shape[0], "width": image.shape[1], **content}
        write_text(f"{stem}.json", json.dumps(content, indent=1) + "\n")
        print(f"{photo} -> {', '.join(f'{stem}.{suffix}' for suffix in [*pictures, 'json'])}: {summary}")


def find_photos(arguments):
    """The photos that the arguments name, each once. An argument is a photo or a folder of photos.

    Raises:
        InputError: there is no argument, a photo is missing, or a folder has no photos.
    """
    from axial.data.files import PHOTOS
    from axial.errors import InputError

    if not arguments:
        raise InputError("name at least one photo, or a folder of photos")
    photos = []
    for argument in arguments:
        if os.path.isdir(argument):
            inside = sorted(name for name in os.listdir(argument) if name.lower().endswith(PHOTOS))
            if not inside:
                raise InputError(f"{argument}: no photo in this folder; their names end in {', '.join(PHOTOS)}")
            photos += [os.path.join(argument, name) for name in inside]
        elif os.path.isfile(argument):
            photos.append(argument)
        else:
            raise InputError(f"{argument}: no such photo")
    return list({os.path.realpath(photo): photo for photo in photos}.values())


def output_names(photos):
    """dict from photos to the names of their outputs, all different.

    A name is the photo's file name without its suffix. If two photos share it, it is the file name with suffix. If they
    share that too, it is the path below their common folder.
    """
    above = os.path.commonpath([os.path.dirname(os.path.realpath(photo)) for photo in photos])

    def forms(photo):
        name = os.path.basename(photo)
        below = os.path.relpath(os.path.realpath(photo), above)
        return os.path.splitext(name)[0], name, below.replace(os.sep, "-")

    for names in zip(*map(forms, photos)):
        if len(set(names)) == len(names):
            break
    return dict(zip(photos, names))


def main():
    app.run(_main, sys.modules[__name__], takes="PHOTO ...", writes=("output_dir",))
