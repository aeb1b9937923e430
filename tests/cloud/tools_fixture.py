"""Stand-ins for kubectl, sky and gcloud, which log their calls and run the shell commands that a test gives."""

import os

import pytest

TOOLS = ("kubectl", "sky", "gcloud")
SCRIPT = """#!/bin/bash
printf '%s\\n' "{name} $*" >>"{folder}/calls"
for word in "$@"; do  # keeps the submitted file
  file=${{word##*=}}
  case $word in *.yaml | *.sh) cp "$file" "{folder}/handed" ;; esac
done
call="$* "
"""


class Tools:
    """Installs the stand-ins in a folder. `path` is a value of PATH that finds them."""

    def __init__(self, folder):
        self._folder = folder
        (folder / "bin").mkdir(parents=True)
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        for name in TOOLS:
            path = folder / "bin" / name
            path.write_text(SCRIPT.format(name=name, folder=folder))
            path.chmod(0o755)

    def answers(self, name, text, does):
        """Makes a tool run shell commands when its arguments contain the text."""
        with open(self._folder / "bin" / name, "a", encoding="utf-8") as file:
            file.write(f"if [[ $call == *{_quoted(text)}* ]]; then {does}; exit; fi\n")

    def calls(self):
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def handed(self):
        """Returns the YAML or script that the last launch got."""
        return (self._folder / "handed").read_text()

    def remove(self, name):
        (self._folder / "bin" / name).unlink()


def _quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """`Tools` of the test's folder, which come first in PATH."""
    made = Tools(tmp_path / "tools")
    monkeypatch.setenv("PATH", made.path)
    return made
