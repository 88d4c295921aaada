"""The page in a real browser, opened from disk."""

import json
import shutil
import threading
from contextlib import contextmanager

import pytest

from fedld.study.report import write_report
from fedld.study.report.page import make_server

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: install Debian's chromium and chromium-driver"
)
selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install 'fedld[dev]'")

FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,900",
    ),
)
EVIL = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">'


@contextmanager
def open_browser(profile, *flags):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def page(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([study], out)
    return out


def visit(browser, page):
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"


def requests(browser):
    """Addresses the page has asked for."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def find(browser, selector):
    return browser.find_element("css selector", selector)


def wait(browser, condition):
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: condition())


def click(browser, element):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def fills(browser, chart):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(c => getComputedStyle(c).fill)",
        f"#group-1-{chart} .cell",
    )


def test_it_opens_without_errors_or_requests(browser, page):
    visit(browser, page)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []


def test_charts_are_drawn(browser, page):
    visit(browser, page)
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart] svg')].map(s => [s.clientWidth, s.clientHeight,"
        " s.querySelectorAll('path, rect, use').length])"
    )
    assert len(sizes) == 18
    assert all(width > 200 and height > 100 and shapes > 4 for width, height, shapes in sizes)


def test_the_verdict_is_on_the_first_screen(browser, page):
    visit(browser, page)
    bottom = browser.execute_script(
        "return Math.max(...[...document.querySelectorAll('.answers, .top svg')].map("
        "e => e.getBoundingClientRect().bottom))"
    )
    assert bottom < 2 * 900
    assert find(browser, ".headline").text.startswith("fedld")
    assert [e.text for e in browser.find_elements("css selector", ".answers b")][3] == "Shift loss"


@pytest.mark.parametrize("chart", ["cross-loss", "cosine"])
def test_the_slider_moves_through_rounds(browser, page, chart):
    from selenium.webdriver.common.keys import Keys

    visit(browser, page)
    slider = find(browser, f"#group-1-{chart} .heat-round")
    last = fills(browser, chart)
    assert len(last) == 25
    slider.send_keys(Keys.HOME)
    assert find(browser, f"#group-1-{chart} .heat-value").text == "round 1"
    assert fills(browser, chart) != last
    slider.send_keys(Keys.END)
    assert fills(browser, chart) == last


def test_another_method_has_another_matrix(browser, page):
    from selenium.webdriver.support.select import Select

    visit(browser, page)
    before = fills(browser, "cross-loss")
    Select(find(browser, "#group-1-cross-loss .heat-run")).select_by_visible_text("fedld")
    assert fills(browser, "cross-loss") != before


def test_tables_sort_by_mouse_and_keyboard(browser, page):
    from selenium.webdriver.common.keys import Keys

    visit(browser, page)
    table = find(browser, "table.comparison")
    head = table.find_elements("css selector", "thead button")[1]

    def names():
        return [row.text for row in table.find_elements("css selector", "tbody th")]

    click(browser, head)
    assert names() == ["fedld", "fedprox", "fedavg"]
    head.send_keys(Keys.ENTER)
    assert names() == ["fedavg", "fedprox", "fedld"]
    assert head.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    difference = table.find_elements("css selector", "thead button")[2]
    click(browser, difference)
    assert names()[-1] == "fedavg"  # it has no difference to itself: empty cells stay last


def test_a_legend_hides_a_method(browser, page):
    visit(browser, page)
    key = find(browser, "#group-1-accuracy .legend button")
    part = find(browser, f"#group-1-accuracy svg .{key.get_attribute('data-part')}")
    assert part.is_displayed()
    key.click()
    assert not part.is_displayed()
    assert key.get_attribute("aria-pressed") == "false"


def test_a_pointer_reads_values(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains

    visit(browser, page)
    ActionChains(browser).move_to_element(find(browser, "#group-1-auroc svg")).perform()
    assert "round" in find(browser, "#group-1-auroc .tip").text
    assert "fedprox" in find(browser, "#group-1-auroc .tip").text


def test_the_data_of_a_chart_is_a_table(browser, page):
    visit(browser, page)
    click(browser, find(browser, "#group-1-decomposition summary"))
    wait(browser, lambda: browser.find_elements("css selector", "#group-1-decomposition .data-body table"))
    table = find(browser, "#group-1-decomposition .data-body table")
    assert table.text.startswith("method round local shift aggregation global")
    assert len(table.find_elements("css selector", "tbody tr")) == 3 * 8


def test_everything_has_a_name_for_screen_readers(browser, page):
    visit(browser, page)
    nameless = browser.execute_script(
        "return [...document.querySelectorAll('svg, button, select, input, [role=region]')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    assert find(browser, "html").get_attribute("lang") == "en"
    assert len(browser.find_elements("css selector", "h1")) == 1


def test_dark_and_light(browser, page):
    visit(browser, page)

    def background():
        return browser.execute_script(
            "return getComputedStyle(document.querySelector('.card')).backgroundColor"
        )

    light = background()
    assert find(browser, "#theme").text == "Dark"
    find(browser, "#theme").click()
    assert background() != light
    assert find(browser, "#theme").text == "Light"
    visit(browser, page)  # the choice is remembered
    assert background() != light
    find(browser, "#theme").click()
    assert background() == light


def test_the_table_of_methods_fits_a_window_of_1280_pixels(browser, page):
    browser.set_window_size(1280, 900)
    visit(browser, page)
    table, room = browser.execute_script(
        "const t = document.querySelector('table.comparison');"
        "return [t.offsetWidth, t.parentElement.clientWidth]"
    )
    assert table <= room


def test_all_sections_can_be_seen_in_the_bar_of_a_window_of_1280_pixels(browser, page):
    browser.set_window_size(1280, 900)
    visit(browser, page)
    nav = find(browser, ".bar nav")
    width, room = browser.execute_script("return [arguments[0].scrollWidth, arguments[0].clientWidth]", nav)
    assert width <= room
    last = nav.find_elements("css selector", "a")[-1].rect
    assert last["x"] + last["width"] <= nav.rect["x"] + nav.rect["width"]


def test_malicious_names_are_text(browser, make_study, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0, 1), name=EVIL, names=[f"{EVIL}{i}" for i in range(5)])
    index = json.loads((path / "study.json").read_text())
    for run in index["runs"]:
        run["label"] = EVIL if run["method"] == "fedld" else run["label"]
    (path / "study.json").write_text(json.dumps(index))
    write_report([path], tmp_path / "r.html")
    visit(browser, tmp_path / "r.html")
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return window.hacked ?? null") is None
    assert find(browser, "h1").text == EVIL
    assert find(browser, ".answers b").text == EVIL
    assert browser.find_elements("css selector", "img") == []
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []


def test_a_large_study_stays_small_and_opens(browser, make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"), seeds=(0,), rounds=200, clients=50)
    write_report([path], tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 15e6
    visit(browser, tmp_path / "r.html")
    loaded = browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"the page of 200 rounds x 50 clients loads in {loaded:.0f} ms")
    assert loaded > 0
    assert len(fills(browser, "cross-loss")) == 2500


def test_a_watched_page_follows_the_run(browser, make_run, tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    (run / "rounds.jsonl").write_text("".join(lines[:3]))
    with make_server([run]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        browser.get_log("browser")
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        assert "3 of 8 rounds" in find(browser, ".problems").text
        (run / "rounds.jsonl").write_text("".join(lines))
        (run / "summary.json").write_text(summary)
        wait(browser, lambda: "after round 8" in find(browser, "main").text)
        assert len(fills(browser, "cross-loss")) == 25  # the new charts work, too
        server.shutdown()
    assert [
        e for e in browser.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]
    ] == []
