"""Arrays of this process, and tensors of sessions."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Generator
from typing import Any

import pytest
from forms import Form

import tensor_rpc as rpc

Steps = Generator[Any, Any, None]

numpy = pytest.importorskip("numpy")


def arrays() -> list[Any]:
    """Arrays of all layouts, all of which arrive."""
    base = numpy.arange(24, dtype="float32").reshape(2, 3, 4)
    read_only = base.copy()
    read_only.flags.writeable = False
    return [
        base,
        base.T,
        base[:, ::2],
        base[::-1, :, ::-1],
        base[:, :, 1],
        base[:0],
        base[1, 1, 1:1],
        numpy.asfortranarray(base),
        numpy.broadcast_to(base[0], (5, 3, 4)),
        read_only,
        numpy.array(7.5),
        numpy.zeros((0, 3), "int8"),
        numpy.zeros((3, 0, 2), "uint64"),
        numpy.ones((1, 1, 1), "int16"),
        *(
            numpy.arange(6).astype(dtype)
            for dtype in ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64").split()
        ),
        numpy.random.default_rng(0).random((300, 1000)),
    ]


def test_arrays_come_back_as_they_were(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for made in arrays():
            tensor = yield session.tensor(made)
            assert tensor.shape == made.shape
            assert str(tensor.dtype) == made.dtype.name
            assert (str(tensor.device), tensor.strides) == ("cpu:0", None)
            assert tensor.nbytes == made.nbytes
            back = yield tensor.numpy()
            assert back.dtype == made.dtype
            numpy.testing.assert_array_equal(back, made)
            assert (yield tensor.tolist()) == made.tolist()
            assert (yield tensor.read()) == made.tobytes()
            # Memory of its own, which may be written to.
            if back.size:
                back[...] = 0

    anywhere.run(body)


def test_arrays_are_arguments(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for made in arrays():
            returned = yield session.call("rpc.echo", made)
            numpy.testing.assert_array_equal((yield returned.numpy()), made)
        returned = yield session.call("rpc.echo", {"nested": [numpy.ones(3)]})
        assert (yield returned["nested"][0].tolist()) == [1, 1, 1]

    anywhere.run(body)


def test_numbers_of_numpy_are_numbers(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        echo = yield session.get_function("rpc.echo")
        for number, wanted in [
            (numpy.int8(-3), -3),
            (numpy.uint64(5), 5),
            (numpy.float16(1.5), 1.5),
            (numpy.float64(2.5), 2.5),
            (numpy.bool_(True), True),
            (numpy.str_("text"), "text"),
        ]:
            returned = yield echo(number)
            assert returned == wanted
            assert type(returned) is type(wanted)
        with pytest.raises(OverflowError):
            yield echo(numpy.uint64(2**64 - 1))
        for number in (numpy.complex64(1j), numpy.longdouble(1), numpy.datetime64(0, "s")):
            with pytest.raises(TypeError):
                yield echo(number)

    anywhere.run(body)


def test_bfloat16_is_the_upper_half_of_a_float32(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.empty([3], "bfloat16")
        upper = numpy.array([1.5, -2.0, 0.25], "float32").view("uint16")[1::2]
        yield tensor.write(upper)
        assert (yield tensor.tolist()) == [1.5, -2.0, 0.25]
        try:
            import ml_dtypes
        except ImportError:
            with pytest.raises(TypeError, match="ml_dtypes"):
                yield tensor.numpy()
        else:
            back = yield tensor.numpy()
            assert back.dtype == ml_dtypes.bfloat16
            assert back.tolist() == [1.5, -2.0, 0.25]

    anywhere.run(body)


def test_tensors_of_torch_come_back(anywhere: Form) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def body(session: Any) -> Steps:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bool):
            made = torch.ones((2, 3), dtype=dtype).T
            tensor = yield session.tensor(made)
            back = yield tensor.torch()
            assert back.dtype == dtype
            assert torch.equal(back, made)

    anywhere.run(body)


def test_buffers_are_arrays(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for code, dtype in [("b", "int8"), ("H", "uint16"), ("i", "int32"), ("d", "float64")]:
            tensor = yield session.tensor(array.array(code, [1, 2, 3]))
            assert str(tensor.dtype) == dtype
            assert (yield tensor.tolist()) == [1, 2, 3]
        tensor = yield session.tensor(b"abc")
        assert (yield tensor.read()) == b"abc"
        tensor = yield session.tensor(memoryview(b"abcdef")[::2])
        assert (yield tensor.read()) == b"ace"
        tensor = yield session.tensor([[1, 2], [3, 4]])
        assert (yield tensor.tolist()) == [[1, 2], [3, 4]]
        with pytest.raises(TypeError, match="format"):
            yield session.tensor(memoryview(b"abc").cast("c"))

    anywhere.run(body)


class OnDevice:
    """An array on another device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the first GPU."""
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        """Fail: nobody may ask for it."""
        raise AssertionError


def pointer(capsule: Any, name: bytes) -> int:
    """Return what a capsule holds."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address: int = get(capsule, name)
    return address


class SecretlyOnDevice:
    """An array on another device, which only its export tells."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Fail."""
        raise LookupError

    def __dlpack__(self, **options: Any) -> Any:
        """Return a tensor on the first GPU."""
        capsule = numpy.zeros(3, "float32").__dlpack__()
        # It lies behind the address of the elements.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = 2
        return capsule


class Old:
    """An array of a library that knows only the first version of DLPack."""

    def __init__(self, array: Any) -> None:
        """Wrap an array."""
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the host."""
        return (1, 0)

    def __dlpack__(self, stream: Any = None) -> Any:
        """Return the array."""
        return self.array.__dlpack__()


class New(Old):
    """An array of a library that knows a later version of DLPack than this one."""

    def __dlpack__(self, stream: Any = None, max_version: Any = None) -> Any:
        """Return the array, with another number of the version."""
        capsule = self.array.__dlpack__(max_version=max_version)
        ctypes.c_uint32.from_address(pointer(capsule, b"dltensor_versioned")).value = 2
        return capsule


def test_arrays_that_cannot_be_sent_are_errors_of_the_caller(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for wrong in [
            numpy.array(["text"]),
            numpy.array([object()]),
            numpy.zeros(3, ">f4"),
            numpy.zeros(3, [("a", "i4")]),
            numpy.zeros(3, "datetime64[s]"),
            object(),
            None,
            (yield session.empty([3])),
        ]:
            with pytest.raises(TypeError):
                yield session.tensor(wrong)
        for far in (OnDevice(), SecretlyOnDevice()):
            with pytest.raises(ValueError, match="cuda:0"):
                yield session.tensor(far)
            with pytest.raises(ValueError, match="cuda:0"):
                yield (yield session.empty([3])).copy_to(far)
        with pytest.raises(ValueError, match=r"argument 1: .*cuda:0"):
            yield session.call("rpc.echo", 1, OnDevice())
        huge = numpy.broadcast_to(numpy.zeros(1), (1 << 59,))
        for fails in (session.tensor, lambda huge: session.call("rpc.echo", huge)):
            with pytest.raises((MemoryError, ValueError)):
                yield fails(huge)
        for shape in ([1 << 62], [1 << 40, 1 << 40], [-1], [1 << 50]):
            with pytest.raises((ValueError, MemoryError, rpc.LimitExceededError)):
                yield session.empty(shape)
        for shape in ([1 << 63], [2**100]):
            with pytest.raises(OverflowError):
                yield session.empty(shape)
        for dtype in ("spam", "float33x", "", object()):
            with pytest.raises((ValueError, TypeError)):
                yield session.empty([1], dtype)
        for device in ("spam", "", 3, "cpu:x"):
            with pytest.raises((ValueError, TypeError)):
                yield session.empty([1], device=device)
        with pytest.raises(rpc.DeviceError):
            yield session.empty([1], device="cuda:77")
        assert (yield session.call("rpc.echo", 1)) == 1

    anywhere.run(body)


def test_parts_of_tensors_are_copied(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.tensor(numpy.arange(10, dtype="uint8"))
        assert (yield tensor.read(3, 5)) == bytes([3, 4])
        assert (yield tensor.read(8)) == bytes([8, 9])
        assert (yield tensor.read(4, 4)) == b""
        yield tensor.write(b"\xff\xfe", 8)
        assert (yield tensor.read(7)) == b"\x07\xff\xfe"
        for start, stop in ((0, 11), (5, 4), (11, 11)):
            with pytest.raises(ValueError):
                yield tensor.read(start, stop)
        with pytest.raises(ValueError):
            yield tensor.write(b"abc", 8)
        with pytest.raises(OverflowError):
            yield tensor.read(-1)
        other = yield session.empty([10], "uint8")
        yield other.copy_from(tensor)
        assert (yield other.read()) == (yield tensor.read())
        yield other.copy_from(numpy.zeros(10, "uint8"))
        assert (yield other.tolist()) == [0] * 10
        for wrong in (numpy.zeros(9, "uint8"), numpy.zeros(10, "int8")):
            with pytest.raises(ValueError):
                yield other.copy_from(wrong)
        with pytest.raises(ValueError):
            yield other.copy_from((yield session.empty([10], "float32")))

    anywhere.run(body)


def test_elements_are_copied_into_an_array_that_is_there(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        data = numpy.arange(3 << 20, dtype="uint32").reshape(3, -1)
        tensor = yield session.tensor(data)
        out = numpy.zeros_like(data)
        seen: list[int] = []
        assert (yield tensor.copy_to(out, progress=seen.append)) is None
        assert (out == data).all() and seen[-1] == data.nbytes and len(seen) > 1
        part = numpy.zeros((6, 1 << 20), "uint32")
        yield tensor.copy_to(part[2:5])
        assert (part[2:5] == data).all() and not part[:2].any() and not part[5:].any()
        empty = yield session.empty([0, 2], "float32")
        yield empty.copy_to(numpy.empty((0, 2), "float32"))
        out.flags.writeable = False
        with pytest.raises(ValueError, match="cannot be written"):
            yield tensor.copy_to(out)
        wrong = (numpy.zeros((3, 1 << 20), "int32"), numpy.zeros((1 << 20, 3), "uint32"), part[::2], out)
        for target in (*wrong, numpy.zeros((1 << 20, 3), "uint32").T):
            with pytest.raises(ValueError):
                yield tensor.copy_to(target)
        with pytest.raises(TypeError):
            yield tensor.copy_to([1, 2])
        yield tensor.free()
        with pytest.raises(rpc.InvalidHandleError):
            yield tensor.copy_to(part[2:5])

    anywhere.run(body)


def test_arrays_are_filled_by_each_version_of_dlpack(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.tensor(numpy.arange(3))
        out = numpy.zeros(3, "int64")
        yield tensor.copy_to(Old(out))
        assert out.tolist() == [0, 1, 2]
        out.flags.writeable = False
        with pytest.raises(ValueError, match="cannot be written"):
            yield tensor.copy_to(Old(out))

    anywhere.run(body)


class Immutable(Old):
    """An array that exports the first version of DLPack, and is immutable by what it is."""


Immutable.__module__ = "jaxlib.stand_in"


def test_immutable_arrays_are_not_written(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.tensor(numpy.arange(3))
        out = numpy.zeros(3, "int64")
        with pytest.raises(ValueError, match="cannot be written: it is immutable"):
            yield tensor.copy_to(Immutable(out))
        assert not out.any()

    anywhere.run(body)


def test_arrays_of_jax_come_back_and_are_not_written(anywhere: Form) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")

    def body(session: Any) -> Steps:
        for dtype in ("float32", "int32", "bfloat16", "float16", "uint8", "bool", "complex64"):
            made = jnp.arange(6).reshape(2, 3).astype(dtype)
            tensor = yield session.tensor(made)
            assert str(tensor.dtype) == dtype
            back = yield tensor.numpy()
            assert (numpy.asarray(made) == back).all()
        zeros = jnp.zeros((2, 3), "complex64")
        with pytest.raises(ValueError, match="cannot be written"):
            yield tensor.copy_to(zeros)
        assert not zeros.any()

    anywhere.run(body)


def test_complex_numbers_are_elements(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for dtype in ("complex64", "complex128"):
            made = numpy.array([[1 + 2j, -3j], [0, 4]], dtype)
            tensor = yield session.tensor(made)
            assert str(tensor.dtype) == dtype
            back = yield tensor.numpy()
            assert back.dtype == made.dtype and (back == made).all()
            out = numpy.zeros_like(made)
            yield tensor.copy_to(out)
            assert (out == made).all()

    anywhere.run(body)


def test_a_version_of_dlpack_that_is_too_new_is_refused(anywhere: Form) -> None:
    pytest.importorskip("numpy", minversion="2.1")

    def body(session: Any) -> Steps:
        tensor = yield session.tensor(numpy.arange(3))
        with pytest.raises(ValueError, match="version 2 of DLPack"):
            yield tensor.copy_to(New(numpy.zeros(3, "int64")))

    anywhere.run(body)


def test_arrays_that_are_there_keep_what_was_copied(anywhere: Form) -> None:
    # Memory of arrays that are gone is used again, and that of others never.
    def body(session: Any) -> Steps:
        kept: list[Any] = []
        for number in range(6):
            size = (1 << 20) + 64 * number
            tensor = yield session.tensor(numpy.full(size, number, "uint8"))
            yield tensor.numpy()
            array = yield tensor.numpy()
            view = array[: 1 << 20]
            del array
            kept.append(view)
            assert (yield tensor.read()) == bytes([number]) * size
        for number, view in enumerate(kept):
            assert (view == number).all()
            view[:] = 9

    anywhere.run(body)


def test_views_share_memory(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.tensor(numpy.arange(12, dtype="int32"))
        view = tensor.view([2, 3], byte_offset=8)
        assert isinstance(view, anywhere.module.Tensor)
        assert (view.byte_offset, view.shape) == (8, (2, 3))
        assert (yield view.tolist()) == [[2, 3, 4], [5, 6, 7]]
        inner = view.view([2], byte_offset=4)
        assert inner.byte_offset == 12
        assert (yield inner.tolist()) == [3, 4]
        yield inner.copy_from(numpy.array([-1, -2], "int32"))
        assert (yield tensor.tolist())[:6] == [0, 1, 2, -1, -2, 5]
        columns = tensor.view([3, 4], strides=[1, 3])
        assert columns.strides == (1, 3)
        assert (yield tensor.view([48], "uint8").read(4, 5)) == b"\x01"
        with pytest.raises(ValueError, match="stride"):
            tensor.view([3, 4], strides=[1])
        with pytest.raises(ValueError):
            yield tensor.view([100]).tolist()
        yield tensor.free()
        with pytest.raises(rpc.InvalidHandleError):
            yield view.tolist()

    anywhere.run(body)


def test_copies_report_progress_and_end_with_what_that_raises(anywhere: Form) -> None:
    content = numpy.zeros(4 << 20, "uint8")

    def refuse(count: int) -> None:
        raise ZeroDivisionError(count)

    def body(session: Any) -> Steps:
        seen: list[int] = []
        tensor = yield session.tensor(content, progress=seen.append)
        yield tensor.download(progress=seen.append)
        assert seen.count(content.nbytes) == 2
        assert len(seen) > 4
        with pytest.raises(ZeroDivisionError):
            yield session.tensor(content, progress=refuse)
        with pytest.raises(ZeroDivisionError):
            yield tensor.numpy(progress=refuse)
        with pytest.raises(ZeroDivisionError):
            yield tensor.write(content, progress=refuse)
        with pytest.raises(TypeError):
            yield tensor.numpy(progress=3)
        assert (yield tensor.read(0, 1)) == b"\0"

    anywhere.run(body)


def test_a_tensor_is_an_array_for_others(server: str) -> None:
    with rpc.connect(server) as session:
        tensor = session.tensor(numpy.arange(4))
        assert numpy.from_dlpack(tensor).tolist() == [0, 1, 2, 3]
        assert "int64 on cpu:0" in repr(tensor)
        with pytest.raises(TypeError, match="of a session already"):
            session.tensor(tensor)


def test_objects_of_another_session_are_refused(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        other = yield anywhere.connect()
        theirs, ours = (yield other.tensor([1])), (yield session.tensor([1]))
        echo = yield other.get_function("rpc.echo")
        for wrong in (theirs, echo, [theirs], {"key": echo}):
            with pytest.raises(rpc.InvalidHandleError):
                yield session.call("rpc.echo", wrong)
        with pytest.raises(rpc.InvalidHandleError):
            yield echo(ours)
        with pytest.raises(rpc.InvalidHandleError):
            yield ours.copy_from(theirs)
        with pytest.raises(rpc.InvalidHandleError):
            yield session.set_stream("cpu", (yield other.create_stream("cpu")))
        yield other.close()

    anywhere.run(body)


def test_arguments_that_are_no_values_are_errors_of_the_caller(anywhere: Form) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    cyclic_map: dict[str, Any] = {}
    cyclic_map["self"] = cyclic_map

    class Index:
        def __index__(self) -> int:
            return 2**70

    def body(session: Any) -> Steps:
        echo = yield session.get_function("rpc.echo")
        for wrong in (1j, {1}, object(), int, numpy.float32, iter([]), range(3), ...):
            with pytest.raises(TypeError, match="argument 0: "):
                yield echo(wrong)
            with pytest.raises(TypeError, match="argument 1: "):
                yield echo(1, [wrong])
        for large in (2**63, -(2**63) - 1, 10**100, Index()):
            with pytest.raises(OverflowError, match="64 bits"):
                yield echo(large)
        for nested in (cyclic, deep, cyclic_map):
            with pytest.raises(ValueError, match="nested"):
                yield echo(nested)
        with pytest.raises(UnicodeEncodeError):
            yield echo("\ud800")
        with pytest.raises(OverflowError):
            yield echo(1, lane=-1)
        with pytest.raises(TypeError):
            yield echo(1, spam=2)
        assert (yield echo(1)) == 1

    anywhere.run(body)
