"""Opens an HTML page in a headless Chromium."""

import pathlib
import shutil
import subprocess

import pytest

# No sandbox, because tests may run as root; and no requests of the browser's own.
QUIET = "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"
QUIET += "--disable-component-update", "--disable-sync"
PROBE = """<script>window.onload = () => {
  const images = [...document.images];
  const broken = images.filter(i => !i.complete || !i.naturalWidth);
  const rows = [...document.querySelectorAll('.row')];
  const level = rows.filter(r => new Set([...r.children].map(i => i.getBoundingClientRect().top)).size == 1);
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.title = `images=${images.length} broken=${broken.length} level=${level.length} wide=${wide}`;
};</script>"""


def find_browser():
    """Path of a Chromium. Skips the test if there is none."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return browser or pytest.skip("needs chromium or google-chrome on the path")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A headless Chromium that selenium drives. Skips the test without selenium, a browser or its driver."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options, driver = webdriver.ChromeOptions(), shutil.which("chromedriver")
    if not driver:
        pytest.skip("needs chromedriver on the path")
    options.binary_location = find_browser()
    for flag in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(driver)
    with webdriver.Chrome(options=options, service=service) as browser:
        yield browser


def look(path, tmp_path):
    """Returns a page's DOM as HTML text. `PROBE` replaces the title by the numbers of images and of broken images, the
    number of level rows, whose images have equal tops, and whether the page is wider than the window.
    """
    browser = find_browser()
    path = pathlib.Path(path)
    probe = path.with_name("probe.html")
    text = path.read_text().replace("script-src 'none'", "script-src 'unsafe-inline'")  # lets the probe run
    probe.write_text(text.replace("</body>", f"{PROBE}</body>"))
    command = [browser, *QUIET, f"--user-data-dir={tmp_path}"]
    command += ["--window-size=1200,900", "--virtual-time-budget=10000", "--dump-dom", f"file://{probe}"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout
