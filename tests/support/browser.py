"""A headless Chromium driven by Selenium. Tests are skipped if the Debian packages are not installed."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.skips import import_optional


@contextmanager
def chromium(*, width: int = 1280, height: int = 800) -> Iterator:
    """A window of the given size in light mode, which logs all requests and console messages."""
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
        set_color_scheme(browser, "light")
        yield browser
    finally:
        browser.quit()


def set_color_scheme(browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def sent_requests(browser) -> list[str]:
    """URLs requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [message["params"]["request"]["url"] for message in sent]


def console_messages(browser) -> list[str]:
    """Console messages since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]
