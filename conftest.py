"""What is optional is looked into where it is installed; tests leave the environment as it was."""

import os
from importlib.util import find_spec

import pytest

OPTIONAL = ("torch", "jax")

collect_ignore_glob = [
    pattern
    for name in OPTIONAL
    if not find_spec(name)
    for pattern in (f"mpistrat/{name}/*", f"mpistrat/examples/*_{name}.py")
]

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True, scope="module")
def _variables_of_torchrun():
    """Take back what `mt.init_process_group` has set: jobs that later tests start inherit it."""
    before = {name: os.environ.get(name) for name in _OF_TORCHRUN}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
