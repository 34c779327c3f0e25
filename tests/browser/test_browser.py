"""The dashboard and the sweep report in a real browser, operated like a user would."""

import contextlib
import json
import os
import re
import socket
import time

import pytest

from maxhydra.record.atomic_io import process_start
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.runs.registry import Registry
from maxhydra.runs.sweep import write_sweep_report
from tests.support.browser import console_messages, sent_requests, set_color_scheme
from tests.support.run_folders import change_facts, metrics_lines, write_run

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Twelve runs of a sweep, a failed run, and a running one whose process is this one."""
    folder = tmp_path_factory.mktemp("browser") / "outputs"
    for number in range(12):
        rate, day = 10 ** (-4 + number / 5), f"2026-03-{number + 1:02d}"
        write_run(folder / "lr" / f"{number}_lr", rate=rate, seed=number % 3, created=f"{day}T12:00:00Z")
    write_run(folder / "failed", status="failed", steps=3, reason=EVIL, tags=[EVIL], notes="''")
    live = write_run(folder / "live", status="running", steps=10, created="2026-04-01T12:00:00Z")
    (session,) = json.loads((live / "run.json").read_text())["sessions"]
    own_process = {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_start(os.getpid())}
    change_facts(live, sessions=[{**session, **own_process}])
    return folder


def until(browser, script, seconds=240):
    """Wait until a script returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if value := browser.execute_script(f"return {script}"):
                return value
        time.sleep(0.1)
    raise AssertionError(f"never true: {script}; console: {console_messages(browser)}")


def names(browser):
    return browser.execute_script("return [...document.querySelectorAll('#body tr[data-run]')].map(r => r.dataset.run)")


def type_into(browser, selector, text):
    box = browser.find_element("css selector", selector)
    box.clear()
    box.send_keys(text)
    return box


def set_value(browser, selector, value, event="change"):
    """Set the value of a control as a user would who cannot type it, such as a slider or a menu."""
    node = browser.find_element("css selector", selector)
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2]))"
    browser.execute_script(script, node, str(value), event)


def press(browser, selector):
    browser.find_element("css selector", selector).click()


def open_dashboard(browser, server, fragment="#flat=1"):
    browser.get("about:blank")
    browser.get(server.url + fragment)
    until(browser, "document.querySelectorAll('#body tr').length")


def chart(metric):
    """Script: the uPlot chart of a metric."""
    return f"document.querySelector('[data-metric=\"{metric}\"] .plot').chart"


def curve_count(browser, metric):
    """Script: number of curves of a chart that have a name, so neither raw values behind smoothed ones nor bands."""
    return f"{chart(metric)}.series.slice(1).filter(s => s.label && s.label !== 'Value').length"


def overflow(browser):
    return browser.execute_script("return document.documentElement.scrollWidth - innerWidth")


def check_clean(browser, *origins):
    """Check that no foreign URL was requested, and that nothing was written to the console."""
    urls = sent_requests(browser)
    assert urls and all(url.startswith((*origins, "data:", "about:")) for url in urls), urls
    assert console_messages(browser) == []


@pytest.mark.slow
def test_search_sort_and_choose_two(window, server):
    open_dashboard(window, server)
    assert names(window)[0] == "live" and len(names(window)) == 14
    type_into(window, "#search", "lr/1")
    until(window, "document.querySelectorAll('#body tr[data-run]').length === 3")
    assert sorted(names(window)) == ["lr/10_lr", "lr/11_lr", "lr/1_lr"]
    type_into(window, "#search", "status=finished optimizer.learning_rate<0.0003")
    until(window, "document.querySelectorAll('#body tr[data-run]').length === 3")
    type_into(window, "#search", "optimizer.learning_rat<3")
    assert "did you mean" in until(window, "document.querySelector('#problem').textContent")
    type_into(window, "#search", "lr/")
    until(window, "document.querySelectorAll('#body tr[data-run]').length === 12")
    press(window, '[data-sort="value"]')
    best = until(window, "document.querySelector('th[aria-sort=ascending] button')?.dataset.sort === 'value'")
    assert best and names(window)[0] == "lr/5_lr"
    press(window, '[data-sort="value"]')
    assert names(window)[0] == "lr/11_lr"
    press(window, 'tr[data-run="lr/11_lr"] .run')
    press(window, 'tr[data-run="lr/10_lr"] .swatch')
    until(window, f"{curve_count(window, 'loss')} === 2 && {curve_count(window, 'eval/loss')} === 2")
    assert "lr%2F11_lr" in window.execute_script("return location.hash")
    colours = f"{chart('loss')}.series.slice(1).map(s => s._stroke)"
    assert len(set(window.execute_script(f"return {colours}"))) == 2
    check_clean(window, server.url)


def test_the_cursor_reads_the_same_step_in_every_chart(window, server, outputs):
    open_dashboard(window, server, "#run=lr/3_lr&run=lr/4_lr&tab=curves")
    until(window, f"{curve_count(window, 'loss')} === 2")
    plot = window.find_element("css selector", '[data-metric="loss"] .plot')
    window.execute_script("arguments[0].focus()", plot)
    plot.send_keys("\ue014" * 3)
    readout = "document.querySelector('[data-metric=\"{}\"] .readout').textContent"
    assert until(window, readout.format("loss")).startswith("step 3")
    rows = [json.loads(text) for text in (outputs / "lr" / "3_lr" / "metrics.jsonl").read_text().splitlines()]
    shown = window.execute_script(f"return {readout.format('loss')}")
    assert f"{next(row['loss'] for row in rows if row['step'] == 3):.4g}" in shown
    assert window.execute_script(f"return {readout.format('eval/loss')}").startswith("step 10")
    press(window, "#log")
    set_value(window, "#smoothing", 0.9, "input")
    until(window, f"{chart('loss')}.series.length === 5 && {chart('loss')}.scales.y.distr === 3")
    check_clean(window, server.url)


def test_curves_grow_while_the_run_trains(window, server, outputs):
    open_dashboard(window, server, "#run=live&tab=curves&flat=1")
    path = f"{chart('loss')}.data[0].length"
    before = until(window, path)
    with (outputs / "live" / "metrics.jsonl").open("a") as file:
        file.write("".join(metrics_lines(step, 2.0) for step in range(11, 20)))
    until(window, f"{path} > {before}")
    step = "document.querySelector('tr[data-run=live] .steps').textContent"
    until(window, f"{step} === '19'")
    (outputs / "live" / "log.txt").open("a").write("something new\n")
    press(window, '[data-tab="log"]')
    until(window, "document.querySelector('.log')?.textContent.includes('something new')")
    change_facts(outputs / "live", status="finished")
    until(window, "document.querySelector('tr[data-run=live] .status').textContent === 'finished'")
    check_clean(window, server.url)


def test_tabs_columns_keys_and_read_errors(window, server, outputs):
    open_dashboard(window, server, "#run=lr/0_lr&run=lr/1_lr&tab=compare&flat=1")
    assert "optimizer.learning_rate" in until(window, "document.querySelector('.compare')?.textContent")
    press(window, '[data-tab="system"]')
    until(window, "document.querySelector('#machine')?.textContent.includes('Memory')")
    until(window, f"{curve_count(window, 'tokens_per_second')} === 2")
    type_into(window, "#column", "optimizer.learning_rate\n")
    until(window, "document.querySelector('[data-sort=\"optimizer.learning_rate\"]')")
    press(window, '[data-sort="optimizer.learning_rate"]')
    until(window, "document.querySelector('#body tr[data-run]').dataset.run === 'lr/0_lr'")
    body = window.find_element("css selector", "body")
    body.send_keys("/")
    assert window.switch_to.active_element.get_attribute("id") == "search"
    window.switch_to.active_element.send_keys("lr/7", "\ue015")
    until(window, "document.querySelectorAll('#body tr[data-run]').length === 1")
    window.switch_to.active_element.send_keys(" ")
    until(window, "document.querySelectorAll('#legend li').length === 3")
    broken = write_run(outputs / "broken")
    (broken / "run.json").write_text("{")
    press(window, "#theme")
    until(window, "!document.querySelector('#faults').hidden")
    press(window, "#faults")
    assert "broken/run.json: is not JSON" in window.execute_script(
        "return document.querySelector('#fault-list').textContent"
    )
    (broken / "run.json").unlink()
    check_clean(window, server.url)


def test_rollouts_are_filtered_and_followed_over_steps(window, server, outputs):
    writer = RolloutWriter(outputs / "lr" / "3_lr" / "rollouts", "eval", keep=1000)
    for step in (0, 10):
        sampled = [{"prompt_number": -number, "sample": 0, "reward": number, "tokens": 2} for number in range(1, 31)]
        writer.append(
            step, [{**item, "prompt": EVIL, "completion": f"{item['prompt_number']} at {step}"} for item in sampled]
        )
    open_dashboard(window, server, "#run=lr/3_lr&tab=rollouts")
    until(window, "document.querySelectorAll('.rollout').length === 20")
    assert "1 to 20 of 60" in window.find_element("css selector", ".pager").text
    type_into(window, '.filters [name="reward"]', "30:\n")
    until(window, "document.querySelectorAll('.rollout').length === 2")
    press(window, ".rollout button")
    until(window, "document.querySelector('.rollout')?.textContent.includes('-30 at 0')")
    tops = "[...document.querySelectorAll('.rollout')].map((each) => each.getBoundingClientRect().top)"
    assert len(set(window.execute_script(f"return {tops}"))) == 1, "side by side"
    type_into(window, '.filters [name="reward"]', "much\n")
    assert "reward" in until(window, "document.querySelector('#rollouts [role=alert]')?.textContent")


def test_dark_and_light_and_foreign_text(window, server):
    open_dashboard(window, server)
    window.execute_script("localStorage.clear()")
    background = "return getComputedStyle(document.body).backgroundColor"
    open_dashboard(window, server, "#run=failed")
    assert window.execute_script(background) == "rgb(255, 255, 255)"
    press(window, "#theme")
    assert window.execute_script(background) == "rgb(10, 10, 10)"
    open_dashboard(window, server, "#run=failed&tab=compare")
    assert window.execute_script(background) == "rgb(10, 10, 10)"
    window.execute_script("localStorage.clear()")
    set_color_scheme(window, "dark")
    open_dashboard(window, server, "#run=failed&flat=1")
    assert window.execute_script(background) == "rgb(10, 10, 10)"
    set_color_scheme(window, "light")
    assert window.execute_script("return document.querySelectorAll('img').length") == 0
    assert EVIL in window.execute_script("return document.querySelector('tr[data-run=failed]').textContent")
    check_clean(window, server.url)


@pytest.mark.default_cases("1280")
@pytest.mark.parametrize("width", [1280, 1920])
def test_nothing_is_cut_off(window, server, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    open_dashboard(window, server, "#run=lr/0_lr&run=lr/1_lr")
    until(window, f"{curve_count(window, 'loss')} === 2")
    assert overflow(window) <= 0
    wide = window.execute_script("const r = document.querySelector('#rows'); return r.scrollWidth - r.clientWidth")
    assert wide <= 0
    sent_requests(window)


@pytest.mark.slow
def test_the_report_of_a_sweep(window, outputs, tmp_path):
    registry = Registry(outputs)
    folder, runs = registry.runs_under("lr")
    path = write_sweep_report(registry, runs, tmp_path / "sweep.html", title=folder, metric=None, largest=False)
    text = path.read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    sent_requests(window)
    window.get(path.as_uri())
    until(window, "document.querySelectorAll('#parallel path.curve').length === 12")
    until(window, "document.querySelectorAll('.charts path.curve').length === 12")
    axes = "[...document.querySelectorAll('#parallel .name')].map(n => n.firstChild.data)"
    assert window.execute_script(f"return {axes}") == ["learning_rate", "seed", "eval/loss"]
    rows = "[...document.querySelectorAll('.importance th')].map(n => n.textContent)"
    assert window.execute_script(f"return {rows}")[0] == "optimizer.learning_rate"
    command = window.execute_script("return document.querySelector('#best-command').textContent")
    assert command.endswith("maxhydra optimizer.learning_rate=0.001")
    plot = window.find_element("css selector", "#parallel")
    window.execute_script("arguments[0].focus()", plot)
    plot.send_keys("\ue015")
    assert "5_lr" in until(window, "document.querySelector('#parallel-readout b')?.textContent")
    window.execute_script(
        "const s = document.querySelector('#metric'); s.selectedIndex = 1; s.dispatchEvent(new Event('change'))"
    )
    until(window, "document.querySelector('.charts h3').textContent === 'Train loss'")
    press(window, "#theme")
    assert window.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(10, 10, 10)"
    assert overflow(window) <= 0
    check_clean(window, "file:")
