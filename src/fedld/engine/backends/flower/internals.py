"""Every place where fedld reaches into flwr's internals, and the version of flwr that it was written for.

flwr promises nothing about these names. Each is looked up here and nowhere else. So a version that lacks one
gives a sentence that says which it is and what fedld needs it for.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from fedld.errors import FedLDError

MADE_FOR = "1.41"
"""The minor version of flwr that these places were written for."""


@dataclass(frozen=True)
class Place:
    """A name inside flwr: its module, the name (with dots inside a class), and what fedld needs it for."""

    module: str
    name: str
    purpose: str

    def get(self) -> Any:
        """Give the value.

        Raises:
            FedLDError: this version of flwr does not have it.
        """
        return self._look_up(self.name)

    def replace(self, value: Any) -> None:
        """Put another value in its place.

        Raises:
            FedLDError: this version of flwr does not have it.
        """
        self.get()
        owner, _, last = self.name.rpartition(".")
        setattr(self._look_up(owner), last, value)

    def _look_up(self, name: str) -> Any:
        try:
            found: Any = import_module(self.module)
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except (ImportError, AttributeError):
            raise _lacking(f"{self.module}.{self.name}", self.purpose) from None
        return found


def _lacking(name: str, purpose: str) -> FedLDError:
    return FedLDError(
        f"flwr {version('flwr')} has no {name}, which fedld needs to {purpose}; "
        f"fedld was written for flwr {MADE_FOR}"
    )


_CLIENT, _SERVER = "flwr.supernode.runtime.run_clientapp", "flwr.superlink.runtime.run_serverapp"
_NODE = "flwr.supernode.start_client_internal"
CLIENT_ADDRESS = Place(
    "flwr.supercore.protobuf.client",
    "ProtobufClient.from_server_address",
    "let Flower's programs call a Unix socket",
)
SUPERLINK_CONFIG = Place(
    "flwr.superlink.cli.flower_superlink",
    "_parse_superlink_lifespan_config",
    "read the SuperLink's settings",
)
SUPERLINK_LIFESPAN = Place(
    "flwr.superlink.cli.flower_superlink", "SuperLinkLifespan", "start and stop the SuperLink"
)
SUPERLINK_APP = Place("flwr.superlink.main", "create_app", "serve the SuperLink behind its own admission")
SUPERNODE_APP = Place("flwr.supernode.main", "create_app", "serve the SuperNode's tasks on a Unix socket")
SUPERNODE_MAIN = Place("flwr.supernode.cli.flower_supernode", "flower_supernode", "run the SuperNode")
SUPERNODE_HTTP = Place(
    "flwr.supernode.cli.flower_supernode", "_start_supernode_http_api", "give the SuperNode no port"
)
SUPERNODE_TIME = Place(_NODE, "time", "ask for the next message without Flower's pause of three seconds")
SUPERNODE_PULL = Place(_NODE, "_pull_and_store_message", "know when a message has come")
CLIENT_INSTALL = Place(_CLIENT, "install_from_fab", "install nothing that a server sent")
SERVER_INSTALL = Place(_SERVER, "install_from_fab", "install nothing that was submitted")
CLIENT_FOLDER = Place(_CLIENT, "get_project_dir", "load its own ClientApp and no other")
SERVER_FOLDER = Place(_SERVER, "get_project_dir", "load its own ServerApp and no other")
LOADER_FOLDER = Place("flwr.clientapp.utils", "get_project_dir", "load its own ClientApp and no other")
SERVER_GRID = Place(_SERVER, "HttpGrid", "bound replies before they are unfolded")
GRID_CLIENT = Place("flwr.superlink.grid", "HttpGrid._runtime_client", "pull replies object by object")
CLIENT_MAIN = Place("flwr.supernode.cli.flwr_clientapp", "flwr_clientapp", "run a ClientApp")
SERVER_MAIN = Place("flwr.superlink.cli.flwr_serverapp", "flwr_serverapp", "run a ServerApp")
PLACES = tuple(value for value in list(globals().values()) if isinstance(value, Place))


def use_http_client(client: Any, replacement: Any) -> None:
    """Let a client of Flower's send its calls through another HTTP client."""
    if not hasattr(client, "_client"):
        raise _lacking(f"{type(client).__name__}._client", "call a Unix socket")
    client._client.close()
    client._client = replacement


def link_state(app: Any) -> Any:
    """Give the SuperLink's state of nodes, runs and messages."""
    try:
        return app.state.linkstate_factory.state()
    except AttributeError:
        raise _lacking("SuperLink app.state.linkstate_factory", "know nodes by their keys") from None


def runtime_client(grid: Any) -> Any:
    """Give the client through which a grid speaks with the SuperLink."""
    GRID_CLIENT.get()
    return grid._runtime_client


def set_message_id(message: Any, name: str) -> None:
    """Give a message the id under which the SuperLink knows it."""
    if "_message_id" not in vars(message.metadata):
        raise _lacking("Metadata._message_id", "name a reply that it read itself")
    message.metadata.__dict__["_message_id"] = name
