"""A page in Chromium without a window, where Chromium and its driver are installed."""

import shutil
from pathlib import Path
from typing import Any

import pytest


def start() -> Any:
    """The browser's driver; skips where there is none."""
    driver = shutil.which("chromedriver")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not (driver and binary):
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "window-size=1180,1400"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def open_page(chrome: Any, page: Path) -> None:
    """Open a file, which has to bring neither an error nor a request."""
    chrome.get(page.as_uri())
    assert not [entry for entry in chrome.get_log("browser") if entry["level"] != "INFO"]
    assert chrome.execute_script("return performance.getEntriesByType('resource').length") == 0


def luminances(chrome: Any) -> dict[str, list[float]]:
    """For readers who prefer light, then dark colours, those of the background and of the text, 0 to 255."""
    seen = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        body, seen[scheme] = chrome.find_element("tag name", "body"), []
        for name in ("background-color", "color"):
            red, green, blue = (int(part) for part in body.value_of_css_property(name).strip("rgba()").split(",")[:3])
            seen[scheme].append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return seen
