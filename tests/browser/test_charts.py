"""Charts, sweeps, layout and actions of the dashboard in a real browser, compared with NumPy and the files."""

import json
import urllib.parse

import numpy as np
import pytest

from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server
from tests.browser.test_browser import chart, check_clean, curve_count, press, set_value, type_into, until
from tests.support.browser import console_messages, sent_requests
from tests.support.run_folders import change_facts, write_run

pytestmark = pytest.mark.exhaustive
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = "&".join(f"run=seeds/{number}" for number in range(9))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Nine runs: three learning rates with three seeds each, whose losses differ."""
    folder = tmp_path_factory.mktemp("charts") / "outputs"
    rng = np.random.default_rng(0)
    for number in range(9):
        path = folder / "seeds" / str(number)
        created = f"2026-03-0{number + 1}T12:00:00Z"
        write_run(path, rate=RATES[number // 3], seed=number % 3, created=created)
        rows = [
            {"step": step, "loss": 8 / step + float(rng.normal(2, 0.1)), "step_time": 2.0, "tokens_per_second": 50.0}
            for step in range(1, 41)
        ]
        rows[5]["loss"] = "NaN"
        rows += [{"step": step, "eval/loss": 2.0 + number // 3 + float(rng.normal(0, 0.01))} for step in (20, 40)]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        change_facts(path, objective={"name": "eval/loss", "value": rows[-1]["eval/loss"]})
    (folder / "seeds" / "0" / "log.txt").write_text("all fine\n" * 50 + "an Error here\n" + "all fine\n" * 50)
    change_facts(folder / "seeds" / "1", sample="To be or not")
    write_run(folder / "single", created="2026-05-01T12:00:00Z")
    return folder


def visit(browser, server, fragment):
    browser.get("about:blank")
    browser.get(server.url + fragment)
    until(browser, "document.querySelectorAll('#body tr').length")


def address(browser):
    return urllib.parse.parse_qs(browser.execute_script("return location.hash.slice(1)"))


def losses(outputs, number):
    rows = [json.loads(text) for text in (outputs / "seeds" / str(number) / "metrics.jsonl").read_text().splitlines()]
    return np.array([float(row["loss"]) for row in rows if "loss" in row])


def drag(browser, selector, start, end):
    """Drag from one point of an element to another, as shares of its size."""
    box = browser.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.x, b.y, b.width, b.height]",
        selector,
    )
    points = [(box[0] + share[0] * box[2], box[1] + share[1] * box[3]) for share in (start, end)]
    for kind, (x, y), buttons in (
        ("mouseMoved", points[0], 0),
        ("mousePressed", points[0], 1),
        ("mouseMoved", points[1], 1),
        ("mouseReleased", points[1], 0),
    ):
        event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": buttons, "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def columns(browser):
    """The first three columns of the chart of the loss."""
    return np.array(browser.execute_script(f"return {chart('loss')}.data.slice(1, 4)"), float)


def test_groups_have_mean_and_band(window, server, outputs):
    visit(window, server, f"#{SEEDS}&group=optimizer.learning_rate")
    until(window, f"{curve_count(window, 'loss')} === 3")
    legend = window.execute_script("return document.querySelector('.groups').textContent")
    assert legend == "".join(f"learning_rate={rate:.4g} · 3 runs" for rate in RATES)
    curves = np.array([losses(outputs, number) for number in range(3)])
    finite = np.isfinite(curves).all(0)
    high, low, mean = (
        np.array(column, float)[finite] for column in window.execute_script(f"return {chart('loss')}.data.slice(1, 4)")
    )
    np.testing.assert_allclose(mean, curves[:, finite].mean(0), rtol=1e-5)
    np.testing.assert_allclose((low, high), (curves[:, finite].min(0), curves[:, finite].max(0)), rtol=1e-5)
    set_value(window, "#band", "stderr")
    until(window, f"{chart('loss')}.data[1][0] !== {high[0]}")
    high, low = (
        np.array(column, float)[finite] for column in window.execute_script(f"return {chart('loss')}.data.slice(1, 3)")
    )
    np.testing.assert_allclose((high - low) / 2, curves[:, finite].std(0, ddof=1) / np.sqrt(3), rtol=1e-4)
    assert address(window)["band"] == ["stderr"]
    check_clean(window, server.url)


def test_zoom_axes_and_log_scale(window, server):
    visit(window, server, "#run=seeds/0&run=seeds/1")
    until(window, f"{curve_count(window, 'loss')} === 2")
    scale = f"[{chart('loss')}.scales.x.min, {chart('loss')}.scales.x.max]"
    assert window.execute_script(f"return {scale}") == [1, 40]
    drag(window, '[data-metric="loss"] .u-over', (0.25, 0.5), (0.75, 0.5))
    until(window, f"{chart('loss')}.scales.x.max === 30")
    shown = window.execute_script(f"return {scale}")
    assert shown == pytest.approx([1 + 39 / 4, 1 + 39 * 3 / 4], abs=1)
    assert [json.loads(text) for text in address(window)["zoom"]] == [shown]
    assert window.execute_script(f"return {chart('eval/loss')}.scales.x.max") == 30
    plot = window.find_element("css selector", "[data-metric=loss] .u-over")
    window.execute_script("arguments[0].dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))", plot)
    until(window, f"{chart('loss')}.scales.x.max === 40")
    for axis, largest in (("seconds", 80), ("tokens", 4000)):
        set_value(window, "#x", axis)
        until(window, f"{chart('loss')}.scales.x.max === {largest}")
    assert window.execute_script(f"return {chart('loss')}.axes.map(a => a.label)") == ["Tokens", "loss"]
    press(window, "#log")
    until(window, f"{chart('loss')}.scales.y.distr === 3")
    assert address(window) == {"run": ["seeds/0", "seeds/1"], "x": ["tokens"], "log": ["1"]}
    check_clean(window, server.url)


def order(browser):
    return browser.execute_script("return [...document.querySelectorAll('.charts figure')].map(f => f.dataset.metric)")


def test_layout_is_stored_in_address_and_browser(window, server):
    visit(window, server, "#run=seeds/0")
    until(window, curve_count(window, "loss"))
    assert order(window) == ["eval/loss", "loss"]
    click = 'document.querySelector(\'[data-metric="{}"] [title="{}"]\').click()'
    window.execute_script(click.format("loss", "Move left"))
    until(window, "document.querySelector('.charts figure').dataset.metric === 'loss'")
    window.execute_script(click.format("eval/loss", "Make wide"))
    until(window, "document.querySelector('[data-metric=\"eval/loss\"]').classList.contains('wide')")
    shared = window.execute_script("return location.hash")
    visit(window, server, "#run=single")
    until(window, curve_count(window, "loss"))
    assert order(window)[:2] == ["loss", "eval/loss"]
    window.execute_script(click.format("eval/loss", "Hide"))
    until(window, "!document.querySelector('[data-metric=\"eval/loss\"]')")
    assert window.execute_script("return document.querySelector('#hidden option').textContent") == "1 hidden"
    window.execute_script("localStorage.clear()")
    visit(window, server, shared)
    until(window, "document.querySelector('[data-metric=\"eval/loss\"]')?.classList.contains('wide')")
    assert order(window) == ["loss", "eval/loss"]
    press(window, "#layout-reset")
    until(window, "document.querySelector('.charts figure').dataset.metric === 'eval/loss'")
    window.execute_script("localStorage.clear()")
    check_clean(window, server.url)


def test_sweeps_are_folded_and_have_a_live_page(window, server, outputs):
    visit(window, server, "#")
    rows = "[...document.querySelectorAll('#body tr')].map(r => r.dataset.run ?? r.dataset.sweep)"
    assert window.execute_script(f"return {rows}") == ["single", "seeds"]
    press(window, '[data-sweep="seeds"] .front')
    until(window, "document.querySelectorAll('#body tr').length === 11")
    window.execute_script("document.querySelector('[data-sweep=seeds] .quiet').click()")
    until(window, "document.querySelectorAll('#parallel path.curve').length === 9")
    assert address(window)["sweep"] == ["seeds"] and address(window)["tab"] == ["sweep"]
    axes = "[...document.querySelectorAll('#parallel .name')].map(n => n.firstChild.data)"
    assert window.execute_script(f"return {axes}") == ["learning_rate", "seed", "eval/loss"]
    assert (
        window.execute_script("return document.querySelector('.importance th').textContent")
        == "optimizer.learning_rate"
    )
    assert window.execute_script("return document.querySelectorAll('.slice .dot').length") == 18
    assert window.execute_script("return document.querySelectorAll('.contour .dot').length") == 9
    best = window.execute_script("return document.querySelector('#best-so-far .plot').chart.data[2]")
    values = [json.loads((outputs / "seeds" / str(n) / "run.json").read_text())["objective"]["value"] for n in range(9)]
    np.testing.assert_allclose(best, np.minimum.accumulate(values), rtol=1e-6)
    drag(window, '.handle[data-axis="0"]', (0.5, 0.99), (0.5, 0.8))
    until(window, "document.querySelectorAll('#trials tbody tr').length === 3")
    assert window.execute_script("return document.querySelectorAll('#parallel .outside').length") == 6
    link = window.execute_script("return location.hash")
    visit(window, server, link)
    until(window, "document.querySelectorAll('#trials tbody tr').length === 3")
    write_run(outputs / "seeds" / "9", rate=1e-2, created="2026-04-01T12:00:00Z")
    until(window, "document.querySelectorAll('#parallel path.curve').length === 10")
    check_clean(window, server.url)


def test_actions_change_the_run(window, server, outputs):
    visit(window, server, "#run=single")
    until(window, "document.querySelector('[data-action=tag]')")
    press(window, "[data-action=tag]")
    type_into(window, "#dialog-body input", "keep, <b>bold</b>")
    press(window, "#dialog-go")
    until(window, "document.querySelector('tr[data-run=single]').textContent.includes('<b>bold</b>')")
    assert json.loads((outputs / "single" / "labels.json").read_text())["tags"] == {"keep": True, "<b>bold</b>": True}
    press(window, "[data-action=note]")
    type_into(window, "#dialog-body textarea", "the baseline")
    press(window, "#dialog-go")
    until(window, "document.querySelector('tr[data-run=single] .run').title.includes('the baseline')")
    press(window, "[data-action=tag]")
    type_into(window, "#dialog-body input:not([type])", ", ,")
    press(window, "#dialog-body input[value=keep]")
    press(window, "#dialog-go")
    until(window, "!document.querySelector('tr[data-run=single]').textContent.includes('keep')")
    press(window, "[data-action=resume]")
    assert "checkpoint" in until(window, "document.querySelector('#dialog-body').textContent")
    press(window, ".buttons button")
    report = window.execute_script("return document.querySelector('#actions a').href")
    check_clean(window, server.url)
    window.get(report)
    until(window, "document.querySelectorAll('.charts path.curve').length")
    assert window.execute_script("return origin") == "null"
    check_clean(window, server.url)


def test_evaluations_samples_and_log_search(window, server):
    visit(window, server, "#run=seeds/0&run=seeds/1&tab=evaluations")
    text = until(window, "document.querySelector('.compare')?.textContent")
    assert "eval/loss" in text
    press(window, '[data-tab="rollouts"]')
    until(window, "document.querySelector('.sample')?.textContent === 'To be or not'")
    press(window, '[data-tab="log"]')
    set_value(window, ".filters select", "seeds/0")
    until(window, "document.querySelector('.log')?.textContent.includes('all fine')")
    type_into(window, ".filters input", "error")
    until(window, "document.querySelectorAll('.log mark').length === 1")
    assert window.execute_script("return document.querySelector('.log').textContent").strip() == "51  an Error here"
    assert address(window)["find"] == ["error"]
    check_clean(window, server.url)


@pytest.mark.default_cases("curves", "sweep")
@pytest.mark.parametrize("tab", ["curves", "sweep", "compare", "evaluations", "rollouts", "system", "log"])
def test_nothing_is_cut_off_on_a_phone(window, server, tab):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    visit(window, server, f"#run=seeds/0&run=seeds/1&tab={tab}")
    until(window, "document.querySelector('#content').children.length")
    assert window.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    unlabelled = window.execute_script(
        "return [...document.querySelectorAll('input, select, button:not(#dialog-go, [hidden]), textarea')].filter(n =>"
        " !n.closest('label') && !n.getAttribute('aria-label') && !n.textContent.trim()).map(n => n.outerHTML)"
    )
    assert unlabelled == []
    check_clean(window, server.url)


def test_the_printed_url_opens_a_page_that_needs_a_token(window, outputs):
    server = Server(Registry(outputs), host="127.0.0.1", port=0, needs_token=True)
    server.start()
    try:
        visit(window, server, "#run=single")
        until(window, curve_count(window, "loss"))
        assert window.execute_script("return location.href.includes('token')") is False
        assert window.execute_script("return document.cookie") == ""
        window.delete_all_cookies()
        until(window, "document.querySelector('#live').textContent === 'server unreachable'")
    finally:
        server.shutdown()
        server.server_close()
    sent_requests(window)
    console_messages(window)
