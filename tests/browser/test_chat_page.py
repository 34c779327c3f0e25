"""The chat page of the server in a real browser: stream, stop, edit and resend, log-probabilities on hover."""

import time

import pytest
from selenium.webdriver.common.by import By

from maxhydra.config.compose.composer import compose
from maxhydra.decode.sampling_params import PromptEncoder
from tests.decode.test_openai_server import TEMPLATE
from tests.support.browser import chromium, console_messages, sent_requests
from tests.support.fake_engine import WORDS, FakeEngine
from tests.support.running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "t.jinja"
    path.write_text(TEMPLATE)
    prompts = PromptEncoder(compose([f"data.tokenizer.chat_template={path}"]).config.data, vocab_size=320)
    engine = FakeEngine(seconds=0.02)
    server = RunningServer(engine, prompts, max_sequences=20)
    yield server
    server.end()


@pytest.mark.slow
def test_a_conversation_on_the_page(server):
    with chromium() as browser:

        def until(script, seconds=240):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if value := browser.execute_script(f"return {script}"):
                    return value
                time.sleep(0.05)
            raise AssertionError(script)

        def set_tokens(count):
            browser.execute_script(f"document.getElementById('max_tokens').value = {count}")

        def send(text):
            browser.find_element(By.ID, "text").send_keys(text)
            browser.find_element(By.ID, "send").click()

        last = "document.querySelector('.turn:last-child .body').textContent"
        is_idle = "document.getElementById('stop').hidden"
        browser.get(f"http://127.0.0.1:{server.port}/")
        assert until("document.getElementById('model').textContent !== 'maxhydra'") and "tiny" in browser.page_source
        # Stream, with log-probabilities on hover.
        set_tokens(6)
        send("<b>hello</b>")
        until(f"{is_idle} && {last}.split(' ').length === 6")
        assert browser.execute_script(f"return {last}").split()[0] in WORDS
        assert "60.7 %" in until("document.querySelector('.token').title")
        assert not browser.find_elements(By.CSS_SELECTOR, ".turn .body b")
        # Stop frees the slot of the engine.
        set_tokens(400)
        send("more")
        until(f"{last}.split(' ').length > 3")
        browser.find_element(By.ID, "stop").click()
        until(is_idle)
        assert server.idle() and len(browser.execute_script(f"return {last}").split()) < 400
        # Edit drops the later turns, and resends.
        set_tokens(3)
        browser.find_element(By.CSS_SELECTOR, ".turn.user button").click()
        assert browser.find_element(By.ID, "text").get_property("value") == "<b>hello</b>"
        assert not browser.find_elements(By.CSS_SELECTOR, ".turn")
        send("!")
        until(f"{is_idle} && {last}.split(' ').length === 3")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2
        # An error is shown. Nothing is requested from elsewhere, and nothing is logged but that error.
        send("x" * 600)
        until("[...document.querySelectorAll('.error')].some(each => each.textContent.includes('max_context'))")
        assert [message for message in console_messages(browser) if " 400 " not in message] == []
        assert all(f"127.0.0.1:{server.port}" in url or url.startswith("data:") for url in sent_requests(browser))
