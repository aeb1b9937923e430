"""Segments or classifies photos, or finds objects: a JSON for each, and a picture.

Translates sentences: a line of the standard output for each.

%s --model=nuclei --output_dir=OUT cells.png ...              a model that axial ships
%s --model=EXPORT --output_dir=OUT FOLDER                     every photo of a folder
%s --model=RUN --multi_scale --output_dir=OUT photo.jpg ...
%s --model=nuclei --diameter=auto --output_dir=OUT FOLDER       photos of other magnifications
%s --model=EXPORT --text="Two dogs run through the snow." --text=...
%s --model=EXPORT --text_file=SENTENCES.txt                   a sentence a line

For each PHOTO the command writes:
PHOTO.json          the prediction, and the names of the other files
PHOTO.panoptic.png  segmentation: ids of the segments in COCO's panoptic encoding, id = R + 256 G + 65536 B
PHOTO.semantic.png  segmentation: the category id of each pixel
PHOTO.overlay.png   segmentation and detection: the photo with the segments or objects drawn on it
PHOTO.labels.png    with --label_image: the instances, for microscopy software; or PHOTO.labels.tif

The command lists broken photos at its end, and then exits with code 2. What it does not read of a photo's file, as
further pages of a stack or a second channel, it says on standard error. So it does where objects or grey levels are far
from those of the model's training.
Photos of 8 bits keep their values. Of n deeper values or floats, the sqrt(n) / 4 darkest become 0 and the sqrt(n) / 4
brightest 255, or less in noise. A model of an older axial divides them by 1, 4, 16, 64 or 256, as the largest tells.
A model with a DataConfig.photo_scale scales all photos by this factor. Photos larger than its canvas are cut into tiles
that overlap by DataConfig.tile_overlap pixels, and the segments of the tiles are joined.
An export predicts at one scale. To average over scales and mirror images, use the run.
"""

import os
import sys

from absl import flags

from axial.cli import app
from axial.cli.checks import check_model
from axial.io.check import convert_diameter
from axial.io.show import say

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "model",
    None,
    "a model that axial ships, like nuclei; or a run (its best checkpoint), one of its checkpoints, an export, a "
    "safetensors file with its recipe, or hf://OWNER/REPO.",
)
flags.DEFINE_string("saved_model", None, "the older name of --model.")
flags.DEFINE_string("model_dir", None, "the older name of --model.")
flags.DEFINE_list("scales", ["1"], "scales of the canvas to average over; for runs only.")
flags.DEFINE_bool("flip", False, "averages over the mirror image as well; for runs only.")
flags.DEFINE_bool("multi_scale", False, "averages over the recipe's own scales, with --flip; for runs only.")
flags.DEFINE_string(
    "diameter",
    None,
    "median diameter of the photos' objects in pixels: photos are scaled so that the objects have the size of the "
    "training's. 'auto' finds it for each photo.",
)
flags.DEFINE_multi_string("text", [], "a sentence to translate.")
flags.DEFINE_string("text_file", None, "UTF-8 file with a sentence to translate on each line.")
flags.DEFINE_string("output_dir", ".", "folder for PHOTO.json and the pictures that it names.")
flags.DEFINE_enum(
    "label_image",
    None,
    ["png", "tiff"],
    "also writes PHOTO.labels.png or PHOTO.labels.tif with 16 bits a pixel: 0 for the background, i for the instance "
    "whose 'label' is i in PHOTO.json. Instances are segments of things, or masks of detected objects. Where masks "
    "overlap, a pixel belongs to the object with the better score.",
)


def _main(arguments):
    from axial.errors import InputError

    named = [name for name in ("model", "saved_model", "model_dir") if FLAGS[name].value]
    if len(named) != 1:
        raise InputError(
            "one --model is needed, like --model=nuclei, which comes with axial; to get one of other classes: "
            "axial-train --model_dir=RUN, then --model=RUN"
        )
    app.refuse_beside("multi_scale", ["scales"])
    scales = app.positive_numbers("scales", FLAGS.scales)
    what = FLAGS.model or app.as_path(FLAGS[named[0]].value)
    texts = _texts(arguments)
    if texts and FLAGS.label_image:
        raise InputError(f"--label_image={FLAGS.label_image}: a text has no instances")
    if FLAGS.diameter is not None:
        convert_diameter("--diameter", FLAGS.diameter)
        if texts:
            raise InputError(f"--diameter={FLAGS.diameter}: a text has no objects")

    from axial.data.files import find_photos
    from axial.io.write import try_folder

    names = {} if texts else output_names(find_photos(arguments))
    if names:  # translations go to the standard output
        try_folder("output_dir", FLAGS.output_dir)
    source = check_model(what)
    app.silence_xla()
    predictor = _predictor(what, source, scales)
    if predictor.evaluation.takes != ("text" if texts else "photo"):
        wanted = "photos" if texts else "--text or --text_file"
        raise InputError(f"{what}: does {predictor.evaluation.name}; it takes {wanted}")
    if FLAGS.diameter is not None:
        from axial.serving.zoom import Zoomed

        predictor = Zoomed(predictor, FLAGS.diameter)
    if texts:
        _translate(predictor, texts)
    else:
        _predict_photos(predictor, names)


def _predictor(what, source, scales):
    """The `Predictor` of a `Source`, which messages call `what`, with the flags' looks at a photo."""
    from axial import configuration
    from axial.errors import InputError
    from axial.serving.predictor import Predictor
    from axial.weights.source import without_recipe

    if source.kind == "weights":
        raise InputError(without_recipe(what))
    if source.kind == "export":
        if FLAGS.flip or FLAGS.multi_scale or FLAGS.scales != ["1"]:
            raise InputError(
                f"--scales, --flip and --multi_scale: {what} is an export, which sees a photo at one scale"
            )
        return configuration.load_export(source)
    task, model = configuration.restore_run(source)
    looks = (task.multi_scale, True) if FLAGS.multi_scale else (scales, FLAGS.flip)
    return Predictor.of_task(task, model, *looks)


def _texts(arguments):
    """The sentences of --text and --text_file, as (where it is from, sentence)."""
    from axial.errors import InputError

    texts = [("--text", text) for text in FLAGS.text]
    if FLAGS.text_file:
        from axial.data.converters.text import lines_of
        from axial.io.read import LARGEST_TEXT, read_file

        lines = lines_of(FLAGS.text_file, read_file(FLAGS.text_file, LARGEST_TEXT))  # as the training text is read
        texts += [(f"{FLAGS.text_file}: line {number}", line) for number, line in enumerate(lines, 1)]
    if texts and arguments:
        raise InputError(f"{arguments[0]}: photos do not go with --text and --text_file")
    if (FLAGS.text or FLAGS.text_file) and not any(text.strip() for _, text in texts):
        raise InputError("--text, --text_file: no sentence; each is empty")
    return texts


def _translate(predictor, texts):
    """Prints the translation of each sentence on a line; that of an empty line is empty."""
    from axial.serving.predictor import check_length

    for where, text in texts:
        check_length(predictor, where, text)
    for _, text in texts:
        summary = ""
        if text.strip():
            prediction = predictor(text.strip())
            summary = predictor.evaluation.describe(text, prediction, predictor.spec).summary
        say(summary)


def _predict_photos(predictor, names):
    """Writes what is predicted of each photo; `names` are those of the outputs.

    Raises:
        InputError: photos that are broken; after all others.
    """
    from axial.data.files import load_photo
    from axial.errors import InputError
    from axial.io.read import first_line
    from axial.io.write import name_broken
    from axial.serving.result import Result

    broken, photos = [], set(map(os.path.realpath, names))
    for photo, name in names.items():
        try:
            image = load_photo(photo, predictor.spec.levels)
        except InputError as error:
            broken.append(str(error))
            continue
        try:
            result = Result.of(predictor, image, photo)
            labels = result.labels if FLAGS.label_image else None
        except InputError as error:  # its size does not suit the scale, or it has too many instances
            broken.append(f"{photo}: {error}")
            continue
        if FLAGS.label_image and labels is None:
            raise InputError(f"--label_image={FLAGS.label_image}: the network finds no pixels of instances")
        files = result.paths(os.path.join(FLAGS.output_dir, name), FLAGS.label_image).values()
        lost = [path for path in files if os.path.realpath(path) in photos]
        if lost:
            broken.append(f"{photo}: {lost[0]} is another photo, and is not overwritten; choose another --output_dir")
            continue
        try:
            result.write(os.path.join(FLAGS.output_dir, name), FLAGS.label_image)
        except (OSError, InputError) as error:
            broken.append(f"{photo}: its prediction cannot be written ({first_line(error)})")
            continue
        say(f"{photo} -> {', '.join(files)}: {result.summary}")
        for warning in result.warnings:
            say(f"{photo}: {warning}", error=True)
    if len(broken) == 1:
        raise InputError(broken[0])
    if broken:
        path = os.path.join(FLAGS.output_dir, "broken.txt")
        raise InputError(name_broken(path, broken, f"{len(broken)} of {len(names)} photos"))


def output_names(photos):
    """dict from photos to the names of their outputs, all different.

    A name is the photo's file name without its suffix. If two photos share it, it is the file name with suffix. If they
    share that too, it is the path below their common folder, with '-' for '/'; see `io.paths.output_names`.
    """
    from axial.io import paths

    above = os.path.commonpath([os.path.dirname(os.path.realpath(photo)) for photo in photos])

    def forms(photo):
        name = os.path.basename(photo)
        below = os.path.relpath(os.path.realpath(photo), above)
        return os.path.splitext(name)[0], name, below.replace(os.sep, "-")

    return dict(zip(photos, paths.output_names(*zip(*map(forms, photos)))))


def main():
    app.run(_main, sys.modules[__name__], takes="PHOTO ...")
