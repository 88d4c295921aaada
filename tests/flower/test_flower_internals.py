"""What fedld needs of flwr's insides is there, or one sentence says what is not."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.runtime import RuntimeHttpClient

from fedld.engine.backends.flower import internals
from fedld.errors import FedLDError

PACKAGE = Path(internals.__file__).parents[3]
REACHING = re.compile(
    r"(?<!self)(?<!super\(\))\._client\b|\._runtime_client|_message_id\"|sys\.modules\[\"flwr"
)


@pytest.mark.parametrize("place", internals.PLACES, ids=lambda place: f"{place.module}.{place.name}")
def test_flwr_has_what_fedld_needs(place):
    assert place.get() is not None


def test_what_changed_in_flwr_is_said_in_one_sentence(monkeypatch):
    place = internals.SERVER_INSTALL
    monkeypatch.delattr(import_module(place.module), place.name)
    for call in (place.get, lambda: place.replace(None)):
        with pytest.raises(FedLDError) as caught:
            call()
        said = str(caught.value)
        assert "has no flwr.superlink.runtime.run_serverapp.install_from_fab" in said
        assert said.endswith("needs to install nothing that was submitted; fedld was written for flwr 1.41")
    gone = internals.Place("flwr.nowhere", "x", "test")
    with pytest.raises(FedLDError, match=r"has no flwr\.nowhere\.x, which fedld needs to test"):
        gone.get()


def test_clients_and_messages_have_the_fields_that_are_set():
    class Other:
        def close(self):
            """Nothing is open."""

    client = RuntimeHttpClient("http://localhost", interceptors=[], verify=False)
    internals.use_http_client(client, Other())
    message = make_message(Metadata(1, "", 2, 1, "m", "", 0.0, 60.0, "train"), RecordDict())
    internals.set_message_id(message, "name")
    assert message.metadata.message_id == "name"
    with pytest.raises(FedLDError, match=r"has no Other\._client"):
        internals.use_http_client(Other(), None)


def test_nothing_else_reaches_into_flwr():
    files = [*PACKAGE.glob("deployment/*.py"), *PACKAGE.glob("engine/backends/flower/*.py")]
    reaching = {
        f"{file.name}:{number}"
        for file in files
        if file.name != "internals.py"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if REACHING.search(line) or re.match(r"from flwr\S* import (.*, )?_", line)
    }
    assert reaching == set()
