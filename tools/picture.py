"""Take the README's pictures, docs/report.png and docs/report-text.png: a report's page in a browser.

    python tools/picture.py                                           # after `make demo`
    python tools/picture.py runs/bench/report.html

The first is the top of the page; the second a text, with the pointer on a drafted token. It needs selenium, Chromium
and its driver (Debian: chromium, chromium-driver).
"""

import argparse
import shutil
from pathlib import Path

from draftsmith.common.command import run_command

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, TOP, TEXT = 1120, 893, 640  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    page = Path("runs/chats/smollm2-medusa+ngram/report.html")
    parser.add_argument("page", nargs="?", type=Path, default=page, help="%(default)s if left out")
    page = parser.parse_args().page
    if not page.is_file():
        raise FileNotFoundError(f"{page}: there is no such page; run make demo first")
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium")
    if not (driver and binary):
        raise FileNotFoundError("there is no chromium or no chromedriver; install both")
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "hide-scrollbars", f"window-size={WIDTH},{TOP}"):
        options.add_argument(f"--{flag}")
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        chrome.get(page.resolve().as_uri())
        chrome.save_screenshot(str(DOCS / "report.png"))
        chrome.set_window_size(WIDTH, TEXT)
        answer = chrome.find_element(By.CLASS_NAME, "answer")
        chrome.execute_script("arguments[0].scrollIntoView(); window.scrollBy(0, -40)", answer)
        token = max(
            answer.find_elements(By.CSS_SELECTOR, "[data-d]"), key=lambda each: int(each.get_attribute("data-d") or 0)
        )
        ActionChains(chrome).move_to_element(token).perform()
        chrome.save_screenshot(str(DOCS / "report-text.png"))
    finally:
        chrome.quit()
    print(f"wrote {DOCS / 'report.png'} and {DOCS / 'report-text.png'}")


if __name__ == "__main__":
    run_command(main)
