"""Stand-ins of kubectl, sky and gcloud: they write down how they are called, and say what a test tells them to."""

import os

import pytest

TOOLS = ("kubectl", "sky", "gcloud")
SCRIPT = """#!/bin/bash
printf '%s\\n' "{name} $*" >>"{folder}/calls"
for word in "$@"; do  # what is handed over
  file=${{word##*=}}
  case $word in *.yaml | *.sh) cp "$file" "{folder}/handed" ;; esac
done
call="$* "
"""


class Tools:
    """See the module. `path` is the value of PATH that leads to them."""

    def __init__(self, folder):
        self._folder = folder
        (folder / "bin").mkdir(parents=True)
        self.path = f"{folder}/bin:{os.environ['PATH']}"
        for name in TOOLS:
            path = folder / "bin" / name
            path.write_text(SCRIPT.format(name=name, folder=folder))
            path.chmod(0o755)

    def answers(self, name, text, does):
        """A tool does this, shell commands, when it is called with some text among its arguments."""
        with open(self._folder / "bin" / name, "a", encoding="utf-8") as file:
            file.write(f"if [[ $call == *{_quoted(text)}* ]]; then {does}; exit; fi\n")

    def calls(self):
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def handed(self):
        """The YAML or script of the last launch."""
        return (self._folder / "handed").read_text()

    def remove(self, name):
        (self._folder / "bin" / name).unlink()


def _quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    made = Tools(tmp_path / "tools")
    monkeypatch.setenv("PATH", made.path)
    return made
