"""The browser of a module, and a dashboard of the run folders in the module's fixture `outputs`."""

import pytest

from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server
from tests.support.browser import chromium


@pytest.fixture(scope="module")
def window():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(outputs):
    server = Server(Registry(outputs), host="127.0.0.1", port=0)
    server.start()
    yield server
    server.shutdown()
    server.server_close()
