"""Segments, detects or classifies: writes a JSON and a picture for each photo.

Translates: prints a line for each sentence.

%s --model=nuclei --output_dir=OUT cells.png ...              a model that axial ships
%s --model=EXPORT --output_dir=OUT FOLDER                     every photo of a folder
%s --model=RUN --multi_scale --output_dir=OUT photo.jpg ...
%s --model=nuclei --diameter=auto --output_dir=OUT FOLDER       photos of other magnifications
%s --model=EXPORT --text="Two dogs run through the snow." --text=...

For each PHOTO the command writes:
PHOTO.json          the prediction, and the names of the other files
PHOTO.panoptic.png  segmentation: ids of the segments in COCO's panoptic encoding, id = R + 256 G + 65536 B
PHOTO.semantic.png  segmentation: the category id of each pixel
PHOTO.overlay.png   segmentation and detection: the photo with the segments or objects drawn on it
PHOTO.labels.png    with --label_image: the instances, for microscopy software (or PHOTO.labels.tif)

If photos are broken, the command predicts the others, lists the broken ones, and exits with code 2. It says on standard
error which contents of a file it does not read, like further pages of a stack or a second channel, and warns if objects
or grey levels differ strongly from the training data.
8-bit photos keep their values. Deeper values and floats are stretched to levels from 0 to 255: of n values, the
sqrt(n) / 4 darkest become 0, and the sqrt(n) / 4 brightest become 255. If the photo is only noise, its brightest values
become less than 255. Models of older versions of axial divide the values by 1, 4, 16, 64 or 256, depending on the
largest value.
Some models scale all photos by one factor. They cut photos larger than their canvas into tiles that overlap by
DataConfig.tile_overlap pixels, and join the segments of the tiles.
An export predicts at one scale. To average over scales and mirror images, use the run.
"""

import os

from axial.cli import app, flags
from axial.cli.flags import Flag
from axial.data.files import find_photos, load_photo
from axial.errors import InputError
from axial.io import paths
from axial.io.read import first_line
from axial.io.show import say
from axial.io.write import name_broken, try_folder


class Predict(flags.Looks):
    takes = "[PHOTO] ..."
    model = flags.MODEL.but(old=("saved_model", "model_dir"))
    diameter = flags.DIAMETER
    text = Flag(tuple, "a sentence to translate.", alone=("label_image", "diameter"))
    output_dir = Flag(str, "folder for PHOTO.json and its pictures.", ".")
    label_image = Flag(
        str,
        "also writes PHOTO.labels.png or PHOTO.labels.tif with 16 bits per pixel: 0 for the background, i for the "
        "instance with 'label' i in PHOTO.json. Where masks overlap, the pixel belongs to the better score.",
        choices=("png", "tiff"),
    )

    def check(self):
        if not self.model:
            raise InputError(
                "one --model is needed, like --model=nuclei, which comes with axial; to train one for other classes: "
                "axial-train --model_dir=RUN, then --model=RUN"
            )
        if self.text:
            if self.arguments:
                raise InputError(f"{self.arguments[0]}: photos do not go with --text")
            if not any(map(str.strip, self.text)):
                raise InputError("--text: no sentence; each is empty")


def _main(given):
    names = {} if given.text else output_names(find_photos(given.arguments))
    if names:  # translations go to standard output
        try_folder("output_dir", given.output_dir)
    source = flags.check_model(given.model)
    app.silence_xla()
    predictor = _predictor(source, given)
    if predictor.evaluator.takes != ("text" if given.text else "photo"):
        expected = "photos" if given.text else "--text"
        raise InputError(f"{given.model}: does {predictor.evaluator.name}; it takes {expected}")
    if given.diameter:
        from axial.serving.zoom import Zoomed

        predictor = Zoomed(predictor, given.diameter)
    if given.text:
        _translate(predictor, given.text)
    else:
        _predict_photos(predictor, names, given)


def _predictor(source, given):
    """The `Predictor` of a `Source`, with the scales and mirror images of the flags."""
    from axial.data.objects import read_objects
    from axial.recipes import configuration
    from axial.serving.predictor import Predictor
    from axial.tasks.base import Inference

    if source.kind == "export":
        if given.flip or given.multi_scale or given.changed("scales"):
            raise InputError(
                f"--scales, --flip and --multi_scale: {given.model} is an export, which predicts at one scale"
            )
        return configuration.load_export(source)
    task, model = configuration.restore_run(source)
    looks = (task.multi_scale, True) if given.multi_scale else (given.scales, given.flip)
    return Predictor.of_task(task, model, Inference(None, *looks), read_objects(source.folder))


def _translate(predictor, texts):
    """Prints one line for each sentence: its translation, or nothing for an empty sentence."""
    from axial.serving.predictor import check_length

    for text in texts:
        check_length(predictor, "--text", text)
    for text in texts:
        describe = predictor.evaluator.describe
        say(describe(text, predictor(text.strip()), predictor.spec).summary if text.strip() else "")


def _predict_photos(predictor, names, given):
    """Writes the predictions of all photos.

    Args:
        predictor: a `Predictor`.
        names: dict from photos to the names of their outputs.
        given: the flags.

    Raises:
        InputError: some photos are broken. The error is raised after the other photos are predicted.
    """
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
            stem = os.path.join(given.output_dir, name)
            files = result.paths(stem, given.label_image).values()
            for path in files:
                if os.path.realpath(path) in photos:
                    raise InputError(f"{path} is another photo, and is not overwritten; choose another --output_dir")
            result.write(stem, given.label_image)
        except (OSError, InputError) as error:  # for example, the photo's size does not suit the scale
            broken.append(f"{photo}: {first_line(error)}")
            continue
        say(f"{photo} -> {', '.join(files)}: {result.summary}")
        for warning in result.warnings:
            say(f"{photo}: {warning}", error=True)
    if len(broken) == 1:
        raise InputError(broken[0])
    if broken:
        path = os.path.join(given.output_dir, "broken.txt")
        raise InputError(name_broken(path, broken, f"{len(broken)} of {len(names)} photos"))


def output_names(photos):
    """dict from photos to unique names of their outputs.

    An output's name is the photo's file name without suffix. If several photos share it, the name is the file name with
    suffix. If several share that too, the name is the path below the photos' common folder, with '-' for '/'; see
    `io.paths.output_names`.
    """
    above = os.path.commonpath([os.path.dirname(os.path.realpath(photo)) for photo in photos])

    def forms(photo):
        name = os.path.basename(photo)
        below = os.path.relpath(os.path.realpath(photo), above)
        return os.path.splitext(name)[0], name, below.replace(os.sep, "-")

    return dict(zip(photos, paths.output_names(*zip(*map(forms, photos)))))


def main():
    app.run({"": (Predict, _main)})
