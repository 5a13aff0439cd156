"""What is optional is looked into where it is installed."""

from importlib.util import find_spec

OPTIONAL = ("torch", "jax")

collect_ignore_glob = [
    pattern
    for name in OPTIONAL
    if not find_spec(name)
    for pattern in (f"mpistrat/{name}/*", f"mpistrat/examples/*_{name}.py")
]
