"""Segments, detects or classifies: writes a JSON and a picture for each photo.

Translates: prints a line for each sentence.

%s --model=nuclei --output_dir=OUT cells.png ...              a model that axial ships
%s --model=EXPORT --output_dir=OUT FOLDER                     every photo of a folder
%s --model=RUN --multi_scale --output_dir=OUT photo.jpg ...
%s --model=nuclei --diameter=auto --output_dir=OUT FOLDER       photos of other magnifications
%s --model=nuclei --table=cells.csv --pixel_size=0.65um FOLDER   a row for each nucleus
%s --model=EXPORT --text="Two dogs run through the snow." --text=...

For each PHOTO the command writes:
PHOTO.json          the prediction, and the names of the other files
PHOTO.panoptic.png  segmentation: ids of the segments in COCO's panoptic encoding, id = R + 256 G + 65536 B
PHOTO.semantic.png  segmentation: the category id of each pixel
PHOTO.overlay.png   segmentation and detection: the photo with the segments or objects drawn on it
PHOTO.labels.png    with --label_image: the instances, for microscopy software (or PHOTO.labels.tif)
PHOTO.geojson       with --geojson: the outlines of the instances, for QuPath

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

import concurrent.futures
import itertools
import os

from axial.cli import app, flags
from axial.cli.flags import Flag
from axial.data.files import find_photos, read_photo
from axial.errors import InputError
from axial.io import paths
from axial.io.check import convert_pixel_size
from axial.io.read import first_line
from axial.io.show import counted, csv_text, say
from axial.io.write import name_broken, try_folder, write_text

THREADS = 2  # while the network predicts one photo, a second one is read, or its files are written


class Predict(flags.Looks):
    takes = "[PHOTO] ..."
    model = flags.MODEL.but(old=("saved_model", "model_dir"))
    diameter = flags.DIAMETER
    text = Flag(tuple, "a sentence to translate.", alone=("label_image", "fill", "geojson", "table", "diameter"))
    output_dir = Flag(str, "folder for PHOTO.json and its pictures.", ".")
    label_image = Flag(
        str,
        "also writes PHOTO.labels.png or PHOTO.labels.tif with 16 bits per pixel: 0 for the background, i for the "
        "instance with 'label' i in PHOTO.json. Where masks overlap, the pixel belongs to the better score.",
        choices=("png", "tiff"),
    )
    fill = Flag(float, "strength of the overlay's colours: 0 draws outlines only; by default 0.3.", least=0, most=1)
    geojson = Flag(bool, "also writes PHOTO.geojson with the outlines of the instances, which QuPath reads.", False)
    table = Flag(
        str,
        "CSV with a row for each instance of all photos: class, area, shape, and mean and sum of each channel.",
        path=flags.OUT_CSV,
    )
    pixel_size = Flag(
        str,
        "side of a pixel and its unit, like 0.65um: the table has areas and lengths in this unit too.",
        read=flags.checked(convert_pixel_size),
        needs="table",
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
        if given.table and os.path.realpath(given.table) in map(os.path.realpath, names):
            raise InputError(f"--table={given.table}: is one of the photos")
    source = flags.check_model(given.model)
    app.import_tensorflow()
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
            raise InputError(f"--scales, --flip, --multi_scale: {given.model} is an export, which has one scale")
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
        InputError: the model finds no pixels of instances, and an output needs them. Or some photos are broken, which
            is raised after the other photos are predicted.
    """
    from axial.serving.measure import NO_PIXELS, columns
    from axial.serving.result import Result

    broken, photos, tables = [], set(map(os.path.realpath, names)), []
    needing = next(iter(given.changed("label_image", "geojson", "table")), None)

    def finish(photo):
        """Predicts a photo and writes its files, none if it does not suit the flags. Returns a text if it is broken."""
        try:
            image, stored = read_photo(photo, predictor.spec.levels)
        except InputError as error:
            return str(error)
        try:
            result = Result.of(predictor, image, photo, stored)
            suits = not needing or result.labels is not None
            files = _write(result, os.path.join(given.output_dir, names[photo]), photos, given) if suits else []
            return result, files, [columns(result, given.pixel_size)] if given.table and suits else []
        except (OSError, InputError) as error:  # for example, its size does not suit the scale
            return f"{photo}: {first_line(error)}"

    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    try:
        for photo, outcome in zip(names, pool.map(finish, names)):
            if isinstance(outcome, str):
                broken.append(outcome)
                continue
            result, files, table = outcome
            if not files:
                raise InputError(f"--{needing}: {given.model} does {predictor.evaluator.name}, and {NO_PIXELS}")
            tables += table
            say(f"{photo} -> {', '.join(files)}: {result.summary}")
            for warning in result.warnings:
                say(f"{photo}: {warning}", error=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if tables:
        _write_table(given.table, tables)
    if len(broken) == 1:
        raise InputError(broken[0])
    if broken:
        path = os.path.join(given.output_dir, "broken.txt")
        raise InputError(name_broken(path, broken, f"{len(broken)} of {len(names)} photos"))


def _write(result, stem, photos, given):
    """Writes the files of a `Result` and returns their paths. Raises InputError if one would replace a photo."""
    for path in result.paths(stem, given.label_image, given.geojson).values():
        if os.path.realpath(path) in photos:
            raise InputError(f"{path} is another photo, and is not overwritten; choose another --output_dir")
    return result.write(stem, given.label_image, given.geojson, given.fill)


def _write_table(path, tables):
    """Writes a CSV of the `columns` of all photos. A photo without a column has empty cells there."""
    names = [*dict.fromkeys(itertools.chain(*tables))]
    rows = [row for table in tables for row in zip(*(table.get(name, itertools.repeat(None)) for name in names))]
    write_text(path, csv_text([names, *rows]))
    say(f"{path}: {counted(len(rows), 'object')}")


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
