"""Headless Chromium for the tests of pages, and what opens a page in it and waits."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync"
CHROMIUM += " disable-background-networking disable-component-update"


class Missing(Exception):
    """There is no browser here, told in one line."""


@contextmanager
def driver():
    """A selenium driver of headless Chromium. Raises Missing."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and chromedriver):
        raise Missing("Chromium is not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*CHROMIUM.split(), f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        with webdriver.Chrome(options, Service(chromedriver)) as chromium:
            chromium.set_script_timeout(900)
            yield chromium


def open_page(chromium, page: Path, width: int = 1280) -> None:
    """Open it as a person would from disk, and wait until the model is ready to speak."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.get("about:blank")
    chromium.get_log("browser")
    chromium.get(page.resolve().as_uri())
    wait(chromium, "return document.documentElement.dataset.ready")


def wait(chromium, code: str, seconds: float = 30):
    """Ask until it is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(chromium, seconds, 0.02).until(lambda b: b.execute_script(code), code)
