"""Compiles a small model with TVM, runs it there, and writes both into the folder that is named: model.so, and the inputs and
the output as densely packed little-endian float32."""

import pathlib
import sys

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R


@I.ir_module
class Model:
    @R.function
    def main(
        x: R.Tensor((4, 64), "float32"),
        hidden: R.Tensor((64, 32), "float32"),
        output: R.Tensor((32, 10), "float32"),
    ):
        with R.dataflow():
            features = R.nn.relu(R.matmul(x, hidden))
            classes = R.nn.softmax(R.matmul(features, output))
            R.output(classes)
        return classes


def main(folder: pathlib.Path) -> None:
    executable = tvm.compile(Model, target="llvm")
    random = np.random.default_rng(7)
    arrays = [random.standard_normal(shape, dtype="float32") for shape in [(4, 64), (64, 32), (32, 10)]]
    machine = relax.VirtualMachine(executable, tvm.cpu())
    classes = machine["main"](*[tvm.runtime.tensor(array) for array in arrays]).numpy()
    for name, array in zip(["x", "hidden", "output", "classes"], [*arrays, classes]):
        (folder / f"{name}.f32").write_bytes(array.astype("<f4").tobytes())
    executable.export_library(str(folder / "model.so"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
