"""A real Chromium, driven by its own driver. Both are Debian packages; without them a test says so and is skipped."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.skips import import_optional


@contextmanager
def chromium(*, width: int = 1280, height: int = 800) -> Iterator:
    """A window of that size, light, which notes every request and every line of the console."""
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    webdriver = import_optional("selenium.webdriver", extra="test")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        prefers(browser, "light")
        yield browser
    finally:
        browser.quit()


def prefers(browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def requests(browser) -> list[str]:
    """Addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [message["params"]["request"]["url"] for message in sent]


def complaints(browser) -> list[str]:
    """What the console said since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]
