"""Serve a model: it is loaded once by each client, and lives at the server until the client goes.

    python serve_model.py serve --listen tcp://127.0.0.1:9090
    python serve_model.py ask tcp://127.0.0.1:9090

Without an address both sides run here. Each session has a process of its own, so that a model that
crashes, or takes too much memory, is one client's error.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import tensor_rpc as rpc


class Model:
    """A linear classifier: an object of the session, of which the client has a reference."""

    def __init__(self, weights: np.ndarray) -> None:
        """Take the weights, one column for each class."""
        self.weights = weights.copy()


@rpc.function
def load(weights: np.ndarray) -> Any:
    """Make a model, which the session keeps until its client drops it."""
    return Model(weights)


@rpc.function
async def classify(model: Any, images: np.ndarray) -> Any:
    """Return the class of each image."""
    return (images @ model.weights).argmax(axis=1)


def ask(address: str) -> None:
    """Load a model that tells the largest of four numbers, and use it."""
    with rpc.connect(address) as session:
        model = session["load"](np.eye(4, dtype="float32"))
        images = np.random.default_rng(2).random((5, 4), dtype="float32")
        classes = session["classify"](model, images, timeout=10.0).numpy()
        np.testing.assert_array_equal(classes, images.argmax(axis=1))
        print("classes:", classes.tolist())


def main() -> None:
    """Serve, or ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["serve", "ask"])
    parser.add_argument("address", nargs="?")
    parser.add_argument("--listen", default="tcp://127.0.0.1:9090")
    given = parser.parse_args()
    if given.role == "serve":
        rpc.Server(load, classify, listen=given.listen, isolate="process").serve()
    elif given.address:
        ask(given.address)
    else:
        with rpc.Server(load, classify, isolate="process") as here:
            ask(here.address)


if __name__ == "__main__":
    main()
