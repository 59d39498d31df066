"""The page in a real browser: Debian's chromium, driven headless by selenium."""

import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from test_space import app

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver (Debian)"
    ),
]
WAIT = 120  # seconds, on a machine that does other things too


@pytest.fixture
def page_address(monkeypatch):
    """The page, served on the loopback interface."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[space]'")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = app.build()
    page.launch(server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True)
    yield f"http://127.0.0.1:{port}"
    page.close()


@pytest.fixture
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="drives the browser: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,2600"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # nothing outside is asked
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(WAIT)
    yield driver
    driver.quit()


def until(condition, what):
    """Waits for a condition, and returns its value."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except Exception as error:  # an element that is being replaced
            last = error
        else:
            last = None
        time.sleep(0.2)
    pytest.fail(f"{what} did not come within {WAIT} s ({last!r})")


def screenshot(browser, tmp_path, name):
    """Saves what the browser shows, where AFFDIV_ZOO_SCREENSHOTS says if it is set."""
    folder = Path(os.environ.get("AFFDIV_ZOO_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(folder / name))
    return folder / name


def test_a_visitor_classifies_a_sample_then_an_upload_and_is_told_of_mistakes(page_address, browser, tmp_path):
    def find(selector):
        return browser.find_elements("css selector", selector)

    def loaded_images(selector):
        script = "return [...document.querySelectorAll(arguments[0])].filter(i => i.complete && i.naturalWidth > 0)"
        return browser.execute_script(script + ".length", selector)

    browser.get(page_address)
    until(lambda: find("#classify"), "the page")
    assert browser.title == "affdiv_zoo"

    # Without an image, the visitor is told so.
    find("#classify")[0].click()
    until(lambda: "there is no image yet" in browser.page_source, "the message about the image")

    ship = next(label for label in find("#sample label") if label.text.strip() == "ship")
    ship.click()
    until(lambda: loaded_images("#image img"), "the sample")
    find("#classify")[0].click()
    convolutions = 19
    until(lambda: loaded_images("#divisors img") >= convolutions, "the heat maps")
    until(lambda: loaded_images("#seen img"), "what the model sees")
    text = find("#divisors")[0].text
    assert "conv1: " in text and "layer3.2.conv2: " in text
    answers = find("#answers")[0].text
    assert answers.count("%") == 5
    pixels = Image.open(screenshot(browser, tmp_path, "sample.png")).convert("RGB")
    assert len(set(pixels.resize((140, 260)).getdata())) > 200  # no blank page

    # An image of the visitor's own, and a transformer.
    upload = tmp_path / "upload.png"
    Image.linear_gradient("L").convert("RGB").save(upload)
    model = find("#model input")[0]
    model.click()
    model.send_keys("\ue009a\ue000vit_nano_patch4_32_affine\ue007")  # Control+A, the name, Enter
    browser.execute_script("document.querySelector('#image button[aria-label=\"Clear\"]')?.click()")
    field = until(lambda: find("#image input[type=file]"), "the field for files")[0]
    field.send_keys(str(upload))
    until(lambda: loaded_images("#image img"), "the upload")
    find("#classify")[0].click()
    until(lambda: "blocks.5.mlp.fc1: " in find("#divisors")[0].text, "the transformer's heat maps")
    screenshot(browser, tmp_path, "upload.png")

    # A model that does not exist.
    model = find("#model input")[0]
    model.click()
    model.send_keys("\ue009a\ue000vit_nano_affine\ue007")
    find("#classify")[0].click()
    until(lambda: "did you mean vit_nano_patch4_32_affine" in browser.page_source, "the message about the model")

    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    inside = [message for message in severe if page_address in message and "manifest.json" not in message]
    assert inside == []
