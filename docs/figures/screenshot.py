"""Picture of a report for the README: python docs/figures/screenshot.py PAGE.html PICTURE.png."""

import sys
import tempfile
from pathlib import Path

from selenium import webdriver

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
)


def main(page: Path, picture: Path) -> None:
    """Open the page and save its first screen."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, "--window-size=1280,920", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        browser.get(page.resolve().as_uri())
        browser.save_screenshot(str(picture))
        browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
