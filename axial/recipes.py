"""The recipes of experiments/, as `axial-analyze recipes` shows them."""

import dataclasses
import os
import pathlib

from axial.builders import first_sentence, read_settings
from axial.errors import InputError, nearest
from axial.statements import Statements, experiments_dir, names_in

_NO_LEAVES = ("tasks/", "tiny/")  # folders of what recipes include, and of what is laid over a leaf
COLUMNS = ("recipe", "model", "data", "steps", "batch", "canvas", "what it is")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A leaf of experiments/.

    Attributes:
        path: below experiments/.
        purpose: first sentence of its comment.
        bindings: dict from macros and arguments, like 'STEPS' and 'LossConfig.top_k', to their values; those of
            included files are there too.
    """

    path: str
    purpose: str
    bindings: dict

    @property
    def model(self):
        return self.bindings["MODEL"]

    @property
    def canvas(self):
        """(height, width) of the photos, or None for texts and detectors, whose photos have several sizes."""
        return self.bindings.get("CANVAS") or self.bindings.get("IMAGE")

    def cells(self):
        """The strings of the recipe's row, in the order of `COLUMNS`."""
        canvas = "x".join(map(str, self.canvas)) if self.canvas else "-"
        numbers = (str(self.bindings.get(name, "-")) for name in ("STEPS", "BATCH"))
        return self.path, self.model, os.path.dirname(self.path), *numbers, canvas, self.purpose

    def settings(self):
        """The `Setting`s of the configurables that it names."""
        named = {name.partition(".")[0] for name in self.bindings if "." in name}
        named.update(*map(names_in, self.bindings.values()))
        return [setting for setting in read_settings() if setting.name.partition(".")[0] in named]


def read_recipes():
    """List of all `Recipe`s: every file of experiments/ that has a MODEL, itself or by what it includes."""
    leaves = sorted(pathlib.Path(experiments_dir()).glob("*/*.gin"))
    found = [read_recipe(f"{leaf.parent.name}/{leaf.name}") for leaf in leaves]
    return [recipe for recipe in found if "MODEL" in recipe.bindings and not recipe.path.startswith(_NO_LEAVES)]


def read_recipe(path):
    """The `Recipe` of one file."""
    statements = Statements().read([os.path.join(experiments_dir(), path)], whole=False)
    bindings = {}
    for (scope, name, argument), (value, _) in statements.bindings.items():
        if name == "gin.macro" or not scope:
            bindings[scope or f"{name}.{argument}"] = value
    return Recipe(path, first_sentence(statements.comment), bindings)


def find_recipe(recipes, path):
    """The `Recipe` with a path. Raises InputError, which names the nearest."""
    path = path.removeprefix("experiments/")
    known = {recipe.path: recipe for recipe in recipes}
    if path not in known:
        raise InputError(f"{path}: no recipe has this name{nearest(path, known)}; axial-analyze recipes lists them")
    return known[path]
