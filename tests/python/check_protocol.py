"""Checks a server against PROTOCOL.md with `native_client.py`. Usage: check_protocol.py ADDRESS TOKEN

The server has the functions of the conformance suite. Each check is one function below; the first
that fails ends the program with its traceback.
"""

import struct
import sys

from native_client import (
    ACCEPT, ALLOC, ATTRIBUTE, CANCEL, CLOSE, COPY, EACH_ALONE, FREE_HANDLE, GET_FUNCTION, HELLO, MAGIC, PING, PONG, READ,
    REQUEST, WRITE, Device, Dtype, Packed, Reference, RemoteError, Session, Shape, connect, device, dtype, encode_frame,
    pack, unpack,
)  # fmt: skip

NOT_FOUND, INVALID_HANDLE, INVALID_ARGUMENT, APPLICATION, PANIC, CANCELLED, DEADLINE = 1, 2, 3, 4, 5, 6, 7
UNSUPPORTED, PROTOCOL, UNAUTHENTICATED, VERSION_MISMATCH = 14, 19, 24, 25

ADDRESS, TOKEN = sys.argv[1:]


def open_session(**hello):
    return Session(connect(ADDRESS), TOKEN, hello)


def fails(kind, what, *arguments, **options):
    """Returns the error of `what`, which must have this kind."""
    try:
        result = what(*arguments, **options)
    except RemoteError as error:
        assert error.kind == kind, f"kind {error.kind} instead of {kind}: {error}"
        return error
    raise AssertionError(f"{result!r} instead of an error of kind {kind}")


def floats(*elements):
    return struct.pack(f"<{len(elements)}f", *elements)


def values_come_back_as_they_were():
    session = open_session()
    values = [None, True, 0, -1, 127, 128, -33, 2**63 - 1, -(2**63), 0.5, "h\u00e9\0", "x" * 300, [], [1, [2, [3]]]]
    values += [{"a": 1, None: [True]}, b"", b"xyz", Shape((2, -1)), Dtype(dtype(2, 32)), Device(device(1)), Packed(b"\x07")]
    for value in values:
        assert session.call("echo", value) == value, value
    assert session.call("echo.blocking", b"b") == b"b"
    assert session.call("add", 1, 2) == 3
    session.close()


def messages_of_several_frames_are_joined():
    session = open_session(chunk=70_000)
    data = bytes(range(256)) * 12_000
    assert session.call("echo", [data, "in between", data]) == [data, "in between", data]
    many = list(range(60_000))
    assert session.call("echo", many) == many
    session.close()


def frames_of_different_requests_may_be_mixed():
    session = open_session()
    echo = session.function("echo")
    first, second = (session.next_request, session.next_request + 1)
    session.next_request += 2
    body = pack([2, None, [echo.handle, [b"ab"]]], [])
    session.send(REQUEST, first, 1, body, b"a", more=True)
    session.send(REQUEST, second, 2, pack([2, None, [echo.handle, [2]]]))
    # A ping with the number of the message stands between its frames, and is no part of it.
    session.send(PING, first)
    session.send(REQUEST, first, 1, b"", b"b")
    assert session.wait(second) == 2
    assert session.wait(first) == b"ab"
    session.close()


def tensors_are_written_and_read_in_chunks():
    session = open_session()
    count = 600_000
    tensor = session.request(ALLOC, [Device(device(1)), Dtype(dtype(2, 32)), Shape((count,)), None])
    assert session.request(READ, [tensor, 0, 16]) == bytes(16), "new memory is zeroed"
    data = floats(*(float(number % 977) for number in range(count)))
    chunk = 1 << 20
    writes = [session.submit(WRITE, [tensor, at, data[at : at + chunk]]) for at in range(0, len(data), chunk)]
    assert [session.wait(write) for write in writes] == [None] * len(writes)
    reads = [session.submit(READ, [tensor, at, min(chunk, len(data) - at)]) for at in range(0, len(data), chunk)]
    assert b"".join(session.wait(read) for read in reads) == data
    copy = session.request(ALLOC, [Device(device(1)), Dtype(dtype(2, 32)), Shape((count,)), None])
    assert session.request(COPY, [tensor, copy]) is None
    assert session.call("tensor.sum", copy) == session.call("tensor.sum", tensor)
    fails(INVALID_ARGUMENT, session.request, READ, [tensor, len(data), 1])
    session.free(Reference(8, tensor.handle), Reference(8, copy.handle))
    fails(INVALID_HANDLE, session.request, READ, [tensor, 0, 4])
    session.close()


def attributes_have_their_numbers():
    session = open_session()
    cpu = Device(device(1))
    assert session.request(ATTRIBUTE, [cpu, 0]) is True
    assert session.request(ATTRIBUTE, [Device(device(2, 77)), 0]) is False
    assert session.request(ATTRIBUTE, [cpu, 14]) > 1 << 20, "14 is the size of the memory"
    fails(UNSUPPORTED, session.request, ATTRIBUTE, [cpu, 60_000])
    session.close()


def objects_live_until_they_are_freed():
    session = open_session()
    counter = session.call("counter.new")
    assert counter.extension == 8
    probe = session.call("probe.new", counter, 7)
    assert session.call("probe.payload", probe) == 7
    assert session.request(FREE_HANDLE, [probe.handle]) is None
    assert session.call("counter.value", counter) == 1, "the object was dropped when it was freed"
    fails(INVALID_HANDLE, session.call, "probe.payload", probe)
    fails(INVALID_HANDLE, session.call, "probe.payload", Reference(8, 0xDEAD_BEEF))
    session.free(Reference(8, 0xDEAD_BEEF))
    adder = session.call("make_adder", 5)
    assert adder.extension == 6 and session.wait(session.start(adder, 1)) == 6
    session.close()


def errors_are_data():
    session = open_session()
    fails(NOT_FOUND, session.function, "no.such.function")
    error = fails(APPLICATION, session.call, "fail.application")
    assert "out of paper" in str(error) and error.may_have_run and error.hop == 1
    fails(PANIC, session.call, "fail.panic", "on purpose")
    fails(INVALID_ARGUMENT, session.call, "add", "one", 2)
    fails(UNSUPPORTED, session.request, 99, [])
    assert session.call("add", 1, 2) == 3, "the session lives on"
    session.close()


def lanes_are_independent_and_each_is_in_order():
    session = open_session()
    gate, journal = session.call("gate.new"), session.call("journal.new")
    wait, push = session.function("gate.wait"), session.function("journal.push.blocking")
    held = session.start(wait, gate, lane=1)
    behind = session.start(push, journal, 1, lane=1)
    beside = session.start(push, journal, 2, lane=2)
    alone = [session.start(push, journal, 3, lane=EACH_ALONE)]
    session.wait(beside)
    session.wait(alone[0])
    assert sorted(session.call("journal.entries", journal)) == [2, 3], "lane 1 waits at the gate"
    session.call("gate.open", gate)
    session.wait(held)
    session.wait(behind)
    assert session.call("journal.entries", journal)[-1] == 1
    session.close()


def a_deadline_passes_while_the_function_runs():
    session = open_session()
    gate, wait = session.call("gate.new"), session.function("gate.wait")
    # Where the machine stands still, the deadline may pass before the function begins.
    for limit in (20_000 << doubled for doubled in range(10)):
        error = fails(DEADLINE, session.wait, session.start(wait, gate, lane=1, extras={"d": limit, "unknown": [1]}))
        if error.may_have_run:
            break
    assert error.may_have_run
    session.call("gate.open", gate)
    session.close()


def a_cancelled_request_is_answered():
    session = open_session()
    gate, journal = session.call("gate.new"), session.call("journal.new")
    wait, push = session.function("gate.wait"), session.function("journal.push")
    held = session.start(wait, gate, lane=1)
    waiting = session.start(push, journal, 1, lane=1)
    session.cancel(waiting)
    session.cancel(10_000)
    assert not fails(CANCELLED, session.wait, waiting).may_have_run
    session.call("gate.open", gate)
    session.wait(held)
    assert session.call("journal.entries", journal) == []
    session.close()


def small_replies_pass_large_ones_that_wait_for_credit():
    session = open_session(max_message=1 << 20, window=1 << 20)
    echo = session.function("echo")
    data = bytes(700_000)
    # Nothing is granted for the first until it has been taken, so that the second waits.
    large = [session.start(echo, data, lane=number) for number in (1, 2)]
    small = session.start(echo, 5, lane=3)
    assert session.wait(small) == 5
    assert [session.wait(request) == data for request in large] == [True, True]
    session.close()


def a_ping_is_answered_by_its_number():
    session = open_session()
    gate, wait = session.call("gate.new"), session.function("gate.wait")
    held = session.start(wait, gate, lane=1)
    session.send(PING, 77)
    kind, number, *_ = session.frame()
    assert (kind, number) == (PONG, 77)
    session.call("gate.open", gate)
    session.wait(held)
    session.close()


def a_client_serves_callbacks():
    session = open_session()
    function, source = session.call("rpc.callback.create")
    nexts = [session.start(session.function("rpc.callback.next"), source, lane=EACH_ALONE) for _ in range(2)]
    outer = session.start(session.function("apply"), function, 20, 1, lane=4)
    call, arguments, lane = session.wait(nexts[0])
    assert arguments == [20, 1] and lane == 4
    assert session.call("rpc.callback.done", call, 21) is None
    assert session.wait(outer) == 21
    outer = session.start(session.function("apply"), function, lane=4)
    call, arguments, _ = session.wait(nexts[1])
    error = Packed(pack({"kind": APPLICATION, "message": "no", "application_kind": "tests.No"}))
    session.call("rpc.callback.done", call, None, error)
    error = fails(APPLICATION, session.wait, outer)
    assert error.application_kind == "tests.No"
    last = session.start(session.function("rpc.callback.next"), source, lane=EACH_ALONE)
    session.free(source)
    assert session.wait(last) is None
    session.close()


def signatures_are_told():
    session = open_session()
    assert session.call("rpc.signature", "add") == [["int", "int"], "int"]
    assert session.call("rpc.signature", "no.such.function") is None
    session.close()


def a_client_without_the_token_is_refused():
    fails(UNAUTHENTICATED, Session, connect(ADDRESS), "0123456789abcdef0123456789abcdef-wrong")
    fails(UNAUTHENTICATED, Session, connect(ADDRESS), None)


def another_version_or_key_is_refused():
    fails(VERSION_MISMATCH, open_session, version_min=2, version_max=9)
    fails(20, open_session, key="another server")


def a_wrong_magic_is_answered_by_nothing():
    stream = connect(ADDRESS)
    stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stream.recv(1) == b""


def rule(name, frames):
    """Sends frames that break a rule; the server must say so, and close."""
    session = open_session()
    session.stream.sendall(frames(session))
    while not session.closed:
        session.step()
    assert isinstance(session.closed, RemoteError) and session.closed.kind == PROTOCOL, name


def broken_rules_end_the_session():
    half = pack([GET_FUNCTION, None, ["add"]])
    first = encode_frame(REQUEST, 1, 3, half[:2], more=True)
    rule("an unknown kind", lambda _: encode_frame(47))
    rule("a flag of no meaning", lambda _: struct.pack("<IIQIBBH", 0, 0, 0, 0, PING, 2, 0))
    rule("a reserved field", lambda _: struct.pack("<IIQIBBH", 0, 0, 0, 0, PING, 0, 1))
    rule("a kind of the handshake", lambda _: encode_frame(ACCEPT))
    rule("a kind of servers", lambda _: encode_frame(17, 1, body=b"\xc0"))
    rule("a body beyond its limit", lambda _: struct.pack("<IIQIBBH", 65_537, 0, 1, 0, REQUEST, 0, 0))
    rule("a payload above the chunk", lambda s: struct.pack("<IIQIBBH", 0, s.theirs["chunk"] + 1, 1, 0, REQUEST, 0, 0))
    rule("payload of a control frame", lambda _: encode_frame(CANCEL, 1, payload=b"x"))
    rule("half a handle", lambda _: encode_frame(35, body=bytes(7)))
    rule("bytes left over", lambda _: encode_frame(REQUEST, 1, body=half + b"\xc0"))
    rule("a frame of another lane in a message", lambda _: first + encode_frame(REQUEST, 1, 4, half[2:]))


def a_hello_that_is_no_map_is_refused():
    for body in (pack([1, 1, "client"]), pack({"version_min": 1}), b"\xc1"):
        stream = connect(ADDRESS)
        stream.sendall(MAGIC + encode_frame(HELLO, body=body))
        assert_rejected(stream)
    stream = connect(ADDRESS)
    hello = pack({"version_min": 1, "version_max": 1, "role": "client", "identities": ["token"], "max_message": 1 << 20,
                  "chunk": 1 << 20, "max_requests": 1, "window": 1 << 20, "keep_alive_ms": 5000})  # fmt: skip
    stream.sendall(MAGIC + encode_frame(HELLO, body=hello + b"\xc0"))
    assert_rejected(stream)


def assert_rejected(stream):
    data = b""
    while read := stream.recv(1 << 16):
        data += read
    assert data[:8] == MAGIC and data[8 + 20] == 3, data
    body_len = struct.unpack_from("<I", data, 8)[0]
    assert unpack(data[32 : 32 + body_len])["kind"] == PROTOCOL


def what_follows_a_close_is_not_looked_at():
    session = open_session()
    session.stream.sendall(encode_frame(CLOSE) + encode_frame(47))
    while not session.closed:
        session.step()
    assert session.closed is True


CHECKS = [
    values_come_back_as_they_were,
    messages_of_several_frames_are_joined,
    frames_of_different_requests_may_be_mixed,
    tensors_are_written_and_read_in_chunks,
    attributes_have_their_numbers,
    objects_live_until_they_are_freed,
    errors_are_data,
    lanes_are_independent_and_each_is_in_order,
    a_deadline_passes_while_the_function_runs,
    a_cancelled_request_is_answered,
    small_replies_pass_large_ones_that_wait_for_credit,
    a_ping_is_answered_by_its_number,
    a_client_serves_callbacks,
    signatures_are_told,
    a_client_without_the_token_is_refused,
    another_version_or_key_is_refused,
    a_wrong_magic_is_answered_by_nothing,
    broken_rules_end_the_session,
    a_hello_that_is_no_map_is_refused,
    what_follows_a_close_is_not_looked_at,
]

for check in CHECKS:
    check()
    print("ok", check.__name__, flush=True)
