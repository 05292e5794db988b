"""Train a classifier of handwritten digits on several workers, whose functions are in Python.

Each worker computes a gradient from its share of the images, and allreduce averages them; `disco`
moves the data. The exit code tells whether the classifier has learnt enough.

    python digits.py --workers 4 --over processes
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tensor_rpc as rpc
from tensor_rpc import disco

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "digits.csv.gz"
CLASSES = 10
BATCH = 32
"""Number of images of one step, those of all workers together."""
EPOCHS = 40
RATE = 0.3
WANTED = 0.93
"""The least share of the test images that must be told right."""

Floats = NDArray[np.float32]


@rpc.function
def gradient(images: np.ndarray, classes: np.ndarray, model: np.ndarray, batch: list[int]) -> Any:
    """Return the mean gradient over a batch of this worker's images."""
    pixels, errors = images[batch], probabilities(images[batch], model)
    errors[np.arange(len(batch)), classes[batch]] -= 1
    # The bias is the weight of a pixel that is always set.
    pixels = np.concatenate([pixels, np.ones((len(batch), 1), "float32")], axis=1)
    return (pixels.T @ errors / len(batch)).astype("float32")


@rpc.function
def step(model: np.ndarray, change: np.ndarray, rate: float) -> None:
    """Take one step down the gradient that all workers have found together."""
    model -= np.float32(rate) * change


def probabilities(images: Floats, model: Floats) -> Floats:
    """Return the probability of each class, one row for each image."""
    scores = images @ model[:-1] + model[-1]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=1, keepdims=True)
    return shares


def load() -> tuple[Floats, NDArray[np.uint8]]:
    """Return the images, with pixels from 0 to 1, and their classes, always in the same order."""
    with gzip.open(DATA, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype="uint8")
    np.random.default_rng(0x5EED).shuffle(rows)
    return (rows[:, :-1] / 16).astype("float32"), rows[:, -1].copy()


def train(session: disco.Session, images: Floats, classes: NDArray[np.uint8]) -> Floats:
    """Train on all workers, and return the model."""
    workers = session.num_workers
    share = len(images) // workers
    session.init_ccl("host")
    parts = images[: share * workers].reshape(workers, share, -1)
    own_images = session.scatter(parts, in_group=False)
    own_classes = session.scatter(classes[: share * workers].reshape(workers, share), in_group=False)
    model = session.broadcast(np.zeros((65, CLASSES), "float32"), in_group=False)
    compute, descend = session.get_global_func("gradient"), session.get_global_func("step")
    order, size = np.arange(share), BATCH // workers
    shuffle = np.random.default_rng(7).shuffle
    for _ in range(EPOCHS):
        shuffle(order)
        for start in range(0, share - size + 1, size):
            found = compute(own_images, own_classes, model, order[start : start + size].tolist())
            session.allreduce(found, found, op="avg", in_group=False)
            descend(model, found, RATE)
    session.sync_all()
    trained: Floats = session.copy_from_worker_0(model)
    return trained


def start(over: str, workers: int) -> disco.Session:
    """Start the workers."""
    functions: list[Callable[..., Any]] = [gradient, step]
    if over == "threads":
        return disco.ThreadedSession(workers, functions=functions)
    return disco.ProcessSession(workers, functions=functions)


def main() -> int:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--over", choices=["threads", "processes"], default="processes")
    arguments = parser.parse_args()
    images, classes = load()
    known = len(images) * 4 // 5
    with start(arguments.over, arguments.workers) as session:
        model = train(session, images[:known], classes[:known])
    seen = probabilities(images[known:], model).argmax(axis=1)
    accuracy = float((seen == classes[known:]).mean())
    print(f"test accuracy: {accuracy:.4f} on the last {len(images) - known} images")
    return 0 if accuracy >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
