"""Headless Chromium for the tests of pages, and what opens a page in it and waits."""

import shutil
import tempfile
from pathlib import Path

import pytest

CHROMIUM = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync "
    "disable-background-networking disable-component-update"
).split()


@pytest.fixture(scope="module")
def chromium():
    """A selenium driver of headless Chromium; without one, its tests are skipped and say why."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and chromedriver):
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*CHROMIUM, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        with webdriver.Chrome(options, Service(chromedriver)) as driver:
            driver.set_script_timeout(900)
            yield driver


def open_page(chromium, page: Path, fragment: str = "", width: int = 1280) -> None:
    """Open it as a person would from disk, and wait until it is drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.get("about:blank")  # else only the fragment would change
    chromium.get_log("browser")
    chromium.get(f"{page.resolve().as_uri()}#{fragment}")
    wait(chromium, "const d = document.documentElement.dataset; return d.ready || d.theme")


def wait(chromium, code: str, seconds: float = 30):
    """Ask until it is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(chromium, seconds, 0.02).until(lambda b: b.execute_script(code), code)


def js(chromium, code: str, *arguments):
    """What this code returns, in which `one(selector)` and `all(selector)` find elements."""
    find = "const all = (s) => [...document.querySelectorAll(s)], one = (s) => all(s)[0];"
    return chromium.execute_script(find + code, *arguments)


def texts(chromium, selector: str) -> list[str]:
    code = "return all(arguments[0]).map((e) => e.textContent.toWellFormed())"
    return js(chromium, code, selector)


def text(chromium, selector: str) -> str:
    return texts(chromium, selector)[0]


def press(chromium, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(chromium, duration=0).send_keys(*keys).perform()
