"""requirements.lock pins a version, with hashes, of every package that axial[dev] requires."""

import importlib.metadata
import pathlib
import re
import shlex

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from axial.errors import DISTRIBUTION, pip_install

LOCK = pathlib.Path(__file__).resolve().parent.parent / "requirements.lock"


def test_the_lock_has_every_requirement():
    text = LOCK.read_text()
    pins = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE):
        pins.setdefault(canonicalize_name(name), []).append(version)
    required = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION)]
    required = [r for r in required if r.marker is None or r.marker.evaluate({"extra": "dev"})]
    assert len(required) > 15
    for requirement in required:
        versions = pins.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement.name} is missing; run scripts/lock.sh"
        assert all(requirement.specifier.contains(v) for v in versions), f"{requirement}; run scripts/lock.sh"


def test_every_pin_has_hashes_and_no_index_is_named():
    entries = re.split(r"^(?=[\w.-]+==)", LOCK.read_text(), flags=re.MULTILINE)[1:]
    assert entries and all("--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"^\s*(--index-url|--extra-index-url|--find-links)", LOCK.read_text(), re.MULTILINE)


def test_commands_that_install_an_extra_name_its_packages_alone():
    """`pip_install` never names axial: PyPI's axial is another package, and ours is on no index."""
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    extras = {extra: set() for extra in metadata.get_all("Provides-Extra")}
    for requirement in map(Requirement, importlib.metadata.requires(DISTRIBUTION)):
        for extra in extras:
            if requirement.marker and f'extra == "{extra}"' in str(requirement.marker):
                extras[extra].add((requirement.name, requirement.specifier))
    assert {"onnx", "kernel", "skypilot", "analysis", "hub", "cityscapes"} <= set(extras)
    for extra, packages in extras.items():
        pip, install, *named = shlex.split(pip_install(extra))
        assert (pip, install) == ("pip", "install")
        assert {(one.name, one.specifier) for one in map(Requirement, named)} == packages
        assert not {name for name, _ in packages} & {DISTRIBUTION, "axial"}
