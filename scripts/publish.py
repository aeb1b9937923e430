"""Converts public weights, scores them, writes their card, and uploads them to Hugging Face's hub.

scripts/publish.sh --name=NAME --folder=FOLDER [--data_dir=DATA] [--repository=OWNER/REPO]

NAME is a name of experiments/zoo.csv. FOLDER gets the authors' file, and the folder NAME with its conversion. With
DATA, the card gets our scores of its split val. REPO gets the files of FOLDER/NAME, after `hf auth login`. The columns
hub and sha256 of zoo.csv are written last: then axial.load('NAME') takes this upload. A second call goes on where the
first one failed.
"""

import functools
import os
import shutil
import subprocess
import urllib.request

import msgspec

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed, nearest
from axial.io import show
from axial.io.paths import experiments_dir
from axial.io.read import first_line, read_json
from axial.io.write import file_digest, write_text, write_whole
from axial.weights import zoo

SPLIT = "val"


class Publish(Flags):
    name = Flag(str, "name of a public checkpoint in experiments/zoo.csv.", needed=True)
    folder = Flag(str, "folder of the authors' file and of the conversion.", path=flags.OUT_FOLDER, needed=True)
    data_dir = Flag(str, "converted data, whose split val scores the weights.", path=flags.IN_FOLDER)
    repository = Flag(str, "OWNER/REPO on the hub, which gets the conversion.")


def publish(given):
    """Does what is missing of the steps; see the docstring of this file."""
    rows = {row.name: row for row in zoo.read_zoo() if row.source != zoo.SHIPPED}
    if given.name not in rows:
        raise InputError(f"--name={given.name}: not a public checkpoint of zoo.csv{nearest(given.name, rows)}")
    row, folder = rows[given.name], os.path.join(given.folder, given.name)
    if given.repository:
        check_installed("--repository: needs", "publish", "huggingface_hub")
    if given.data_dir and row.holds == "backbone":
        raise InputError(f"--data_dir: {row.name} is a backbone, which has no scores before a training")

    from axial.weights import convert

    file = os.path.join(given.folder, os.path.basename(row.file))
    if not os.path.exists(file):
        try:
            write_whole(file, functools.partial(_download, row.file))
        except OSError as error:
            raise InputError(f"{row.file}: cannot be downloaded to {file} ({first_line(error)})") from None
    if not os.path.isdir(folder):
        convert.convert(row.source, file, folder, row.model)
    if given.data_dir:
        _add_scores(row, folder, given.data_dir)
    digest = file_digest(os.path.join(folder, convert.WEIGHTS))[1]
    show.say(f"{folder}: {convert.WEIGHTS} has the SHA-256 {digest}")
    if given.repository:
        hub = f"{given.repository}@{_upload(folder, given.repository)}"
        changed = msgspec.structs.replace(row, hub=hub, sha256=digest)
        cells = [msgspec.structs.astuple(changed if each.name == row.name else each) for each in zoo.read_zoo()]
        table = show.csv_text([zoo.ZooRow.__struct_fields__, *cells])
        write_text(os.path.join(experiments_dir(), "zoo.csv"), table)
        show.say(f"uploaded to {hub}, which axial.load({row.name!r}) takes from now on")


def _download(url, path):
    with urllib.request.urlopen(url, timeout=60) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file)


def _add_scores(row, folder, data_dir):
    """Runs axial-evaluate and writes its scores to the card of converted weights."""
    from axial.data.tfrecord import read_manifest
    from axial.weights import card, convert, interchange, restore

    path = f"{folder}.json"
    command = ["axial-evaluate", f"--gin_file={row.recipe}", f"--model={folder}", f"--data_dir={data_dir}"]
    if subprocess.run([*command, f"--split={SPLIT}", f"--json={path}"], check=False).returncode:
        raise InputError(f"{folder}: axial-evaluate cannot score it on {data_dir}")
    scores = {name: x for name, x in read_json(path, dict)[1][SPLIT].items() if x is None or isinstance(x, float)}
    result = interchange.CardScores(SPLIT, read_manifest(data_dir, SPLIT)["examples"], scores)
    model, about = restore.load_weights(folder)
    about = msgspec.structs.replace(about, results=[result])
    card.write_page(folder, interchange.write_safetensors(model, f"{folder}/{convert.WEIGHTS}", about), "weights")


def _upload(folder, repository):
    """Uploads a folder, and returns the commit."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, exist_ok=True)
        return hub.upload_folder(repo_id=repository, folder_path=folder).oid
    except Exception as error:  # the hub's client raises errors of many libraries
        raise InputError(f"--repository={repository}: cannot be uploaded to ({first_line(error)})") from None


if __name__ == "__main__":
    app.run({"": (Publish, publish)})
