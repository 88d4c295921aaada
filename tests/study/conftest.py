import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache of the tests' own: nothing is read from the user's."""
    os.environ["FEDLD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
