"""Opens an HTML page in a headless Chromium."""

import pathlib
import shutil
import subprocess

import pytest

PROBE = """<script>window.onload = () => {
  const images = [...document.images];
  const broken = images.filter(i => !i.complete || !i.naturalWidth);
  const rows = [...document.querySelectorAll('.row')];
  const level = rows.filter(r => new Set([...r.children].map(i => i.getBoundingClientRect().top)).size == 1);
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.title = `images=${images.length} broken=${broken.length} level=${level.length} wide=${wide}`;
};</script>"""


def look(path, tmp_path):
    """Returns a page's DOM as HTML text. `PROBE` replaces the title by the numbers of images and of broken images, the
    number of level rows, whose images have equal tops, and whether the page is wider than the window.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        pytest.skip("needs chromium or google-chrome on the path")
    path = pathlib.Path(path)
    probe = path.with_name("probe.html")
    text = path.read_text().replace("script-src 'none'", "script-src 'unsafe-inline'")  # lets the probe run
    probe.write_text(text.replace("</body>", f"{PROBE}</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--window-size=1200,900", "--virtual-time-budget=10000", "--dump-dom", f"file://{probe}"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout
