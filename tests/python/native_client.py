"""A client of the native protocol, written from PROTOCOL.md alone, with the standard library alone.

It is small rather than fast: one thread, one request after the other unless a check sends several.
`check_protocol.py` uses it to hold the document to its word.
"""

import hashlib
import hmac
import os
import socket
import struct

MAGIC = b"\x93rpc\r\n\x1a\n"

# Kinds of frames (section 2).
HELLO, ACCEPT, REJECT, PROOF = 1, 2, 3, 4
REQUEST, REPLY, ERROR = 16, 17, 18
PING, PONG, CANCEL, FREE, CREDIT, GO_AWAY, CLOSE = 32, 33, 34, 35, 36, 37, 38
MORE = 1

# Operations (section 6).
GET_FUNCTION, CALL, ALLOC, WRITE, READ, COPY, FREE_HANDLE, ATTRIBUTE = 1, 2, 3, 4, 5, 6, 7, 8

MAX_BODY = 65_536
EACH_ALONE = 0xFFFF_FFFF


class ProtocolError(Exception):
    """The peer has broken a rule of the document."""


class RemoteError(Exception):
    """An error map that the peer has sent."""

    def __init__(self, fields):
        super().__init__(fields["message"])
        self.kind = fields["kind"]
        # Each receiver counts the link over which the error came.
        self.hop = fields.get("hop", 0) + 1
        self.application_kind = fields.get("application_kind")
        self.may_have_run = fields.get("may_have_run", False)


class Reference:
    """A function, module or object of the session: its extension type and its handle."""

    def __init__(self, extension, handle):
        self.extension, self.handle = extension, handle


class Tensor:
    """A dense tensor (section 5)."""

    def __init__(self, handle, offset, dtype, device, shape):
        self.handle, self.offset, self.dtype, self.device, self.shape = handle, offset, dtype, device, shape

    def encode(self):
        shape = struct.pack(f"<{len(self.shape)}q", *self.shape)
        return struct.pack("<QQ", self.handle, self.offset) + self.dtype + self.device + bytes([len(self.shape), 0]) + shape

    @classmethod
    def decode(cls, data):
        handle, offset = struct.unpack_from("<QQ", data)
        dtype, device, dimensions, strided = data[16:20], data[20:28], data[28], data[29]
        if strided:
            raise ProtocolError("the checks make dense tensors only")
        shape = struct.unpack_from(f"<{dimensions}q", data, 30)
        if len(data) != 30 + 8 * dimensions:
            raise ProtocolError("a tensor of another length than its dimensions say")
        return cls(handle, offset, dtype, device, list(shape))


class Packed(bytes):
    """MessagePack within a value (extension 5)."""


class Shape(tuple):
    """A shape (extension 2)."""


def dtype(code, bits, lanes=1):
    return struct.pack("<BBH", code, bits, lanes)


def device(kind, index=0):
    return struct.pack("<ii", kind, index)


class Dtype(bytes):
    """A data type (extension 3)."""


class Device(bytes):
    """A device (extension 4)."""


# --- MessagePack, as far as the document uses it -------------------------------------------------


def pack_length(length, fix, fix_limit, wide):
    """Returns the shortest head for a length: `fix` holds it in its low bits, `wide` are (marker, format)."""
    if fix is not None and length < fix_limit:
        return bytes([fix | length])
    for marker, form, limit in wide:
        if length < limit:
            return bytes([marker]) + struct.pack(form, length)
    raise ValueError("too long")


def pack_extension(kind, data):
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(data))
    if fixed is not None:
        return bytes([fixed, kind]) + data
    head = pack_length(len(data), None, 0, [(0xC7, ">B", 1 << 8), (0xC8, ">H", 1 << 16), (0xC9, ">I", 1 << 32)])
    return head + bytes([kind]) + data


def pack_int(value):
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack(">b", value)
    if value >= 0:
        forms = [(0xCC, ">B", 1 << 8), (0xCD, ">H", 1 << 16), (0xCE, ">I", 1 << 32), (0xCF, ">Q", 1 << 64)]
    else:
        forms = [(0xD0, ">b", 1 << 7), (0xD1, ">h", 1 << 15), (0xD2, ">i", 1 << 31), (0xD3, ">q", 1 << 63)]
    for marker, form, limit in forms:
        if (value if value >= 0 else -value - 1) < limit:
            return bytes([marker]) + struct.pack(form, value)
    raise ValueError("beyond 64 bits")


def pack(value, payload=None):
    """Encodes a value. Bytes go to `payload`, and only their length to the body."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return pack_int(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        wide = [(0xD9, ">B", 1 << 8), (0xDA, ">H", 1 << 16), (0xDB, ">I", 1 << 32)]
        return pack_length(len(text), 0xA0, 32, wide) + text
    if isinstance(value, Reference):
        return pack_extension(value.extension, struct.pack("<Q", value.handle))
    if isinstance(value, Tensor):
        return pack_extension(9, value.encode())
    if isinstance(value, Packed):
        return pack_extension(5, bytes(value))
    if isinstance(value, Shape):
        return pack_extension(2, struct.pack(f"<{len(value)}q", *value))
    if isinstance(value, Dtype):
        return pack_extension(3, bytes(value))
    if isinstance(value, Device):
        return pack_extension(4, bytes(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        payload.append(bytes(value))
        return pack_extension(1, struct.pack("<Q", len(value)))
    if isinstance(value, (list, tuple)):
        head = pack_length(len(value), 0x90, 16, [(0xDC, ">H", 1 << 16), (0xDD, ">I", 1 << 32)])
        return head + b"".join(pack(element, payload) for element in value)
    if isinstance(value, dict):
        head = pack_length(len(value), 0x80, 16, [(0xDE, ">H", 1 << 16), (0xDF, ">I", 1 << 32)])
        return head + b"".join(pack(key, payload) + pack(element, payload) for key, element in value.items())
    raise TypeError(type(value))


class Unpacker:
    """Decodes one body with its payload. Every byte of both must be used."""

    NUMBERS = {
        0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
        0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
    }  # fmt: skip
    LENGTHS = {
        0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xC7: ">B", 0xC8: ">H", 0xC9: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I",
        0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
    }  # fmt: skip

    def __init__(self, body, payload=b""):
        self.body, self.at, self.payload, self.used = body, 0, payload, 0

    def take(self, count):
        if self.at + count > len(self.body):
            raise ProtocolError("a body is cut short")
        taken = self.body[self.at : self.at + count]
        self.at += count
        return taken

    def number(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self):
        marker = self.take(1)[0]
        if marker < 0x80:
            return marker
        if marker >= 0xE0:
            return marker - 0x100
        if marker < 0x90:
            return self.map(marker & 0x0F)
        if marker < 0xA0:
            return [self.value() for _ in range(marker & 0x0F)]
        if marker < 0xC0:
            return self.take(marker & 0x1F).decode()
        if marker in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[marker]
        if marker in self.NUMBERS:
            return self.number(self.NUMBERS[marker])
        if 0xD4 <= marker <= 0xD8:
            return self.extension(1 << (marker - 0xD4))
        if marker not in self.LENGTHS:
            raise ProtocolError(f"marker {marker:#x} has no meaning")
        length = self.number(self.LENGTHS[marker])
        if marker in (0xC7, 0xC8, 0xC9):
            return self.extension(length)
        if marker in (0xC4, 0xC5, 0xC6):
            return self.take(length)
        if marker in (0xD9, 0xDA, 0xDB):
            return self.take(length).decode()
        if marker in (0xDC, 0xDD):
            return [self.value() for _ in range(length)]
        return self.map(length)

    def map(self, length):
        return {self.value(): self.value() for _ in range(length)}

    def extension(self, length):
        kind = self.take(1)[0]
        data = self.take(length)
        if kind == 1:
            size = struct.unpack("<Q", data)[0]
            self.used += size
            if self.used > len(self.payload):
                raise ProtocolError("a payload is cut short")
            return self.payload[self.used - size : self.used]
        if kind == 2:
            return Shape(struct.unpack(f"<{length // 8}q", data))
        if kind in (3, 4, 5):
            return {3: Dtype, 4: Device, 5: Packed}[kind](data)
        if kind in (6, 7, 8):
            return Reference(kind, struct.unpack("<Q", data)[0])
        if kind == 9:
            return Tensor.decode(data)
        raise ProtocolError(f"extension {kind} is no value")

    def whole(self):
        value = self.value()
        if self.at != len(self.body) or self.used != len(self.payload):
            raise ProtocolError("bytes are left over behind a value")
        return value


def unpack(body, payload=b""):
    return Unpacker(body, payload).whole()


# --- Frames, handshake and session ---------------------------------------------------------------


def encode_frame(kind, request=0, lane=0, body=b"", payload=b"", more=False):
    head = struct.pack("<IIQIBBH", len(body), len(payload), request, lane, kind, MORE if more else 0, 0)
    return head + body + payload


def cost(size):
    return size if size > 4096 else 0


class Session:
    """A session with the server at the far end of a connected socket."""

    def __init__(self, stream, token=None, hello=None):
        self.stream, self.input = stream, b""
        self.next_request, self.replies, self.partial = 1, {}, {}
        self.going_away, self.closed = None, None
        self.consumed = 0
        self.ours = {
            "version_min": 1,
            "version_max": 1,
            "role": "client",
            "identities": ["token"] if token else ["none"],
            "max_message": 64 << 20,
            "chunk": 1 << 20,
            "max_requests": 1024,
            "window": 65 << 20,
            "keep_alive_ms": 5000,
            **(hello or {}),
        }
        self.handshake(token)

    # Frames

    def receive(self, count):
        while len(self.input) < count:
            read = self.stream.recv(1 << 18)
            if not read:
                raise ConnectionError("the server has closed the connection")
            self.input += read
        taken, self.input = self.input[:count], self.input[count:]
        return taken

    def frame(self):
        body_len, payload_len, request, lane, kind, flags, reserved = struct.unpack("<IIQIBBH", self.receive(24))
        if body_len > MAX_BODY or payload_len > self.ours["chunk"] or reserved or flags & ~MORE:
            raise ProtocolError("a header that breaks the rules of section 2")
        if payload_len and kind not in (REQUEST, REPLY, ERROR):
            raise ProtocolError("payload in a frame that has none")
        return kind, request, lane, flags & MORE, self.receive(body_len), self.receive(payload_len)

    def send(self, kind, request=0, lane=0, body=b"", payload=b"", more=False):
        self.stream.sendall(encode_frame(kind, request, lane, body, payload, more))

    # Handshake (section 3)

    def handshake(self, token):
        ours = pack(self.ours)
        self.stream.sendall(MAGIC + encode_frame(HELLO, body=ours))
        if self.receive(8) != MAGIC:
            raise ProtocolError("the magic is wrong")
        theirs = self.expect(HELLO)
        self.theirs = unpack(theirs)
        if self.theirs["role"] != "server" or self.theirs["identities"] != self.ours["identities"]:
            raise ProtocolError(f"an answer that does not fit: {self.theirs}")
        if token:
            self.prove(token.encode(), ours, theirs)
        self.send(ACCEPT)
        self.expect(ACCEPT)

    def prove(self, secret, ours, theirs):
        challenge = self.expect(PROOF)
        mine = os.urandom(32)
        subject = hashlib.sha256()
        for part in (ours, theirs, b""):
            subject.update(struct.pack("<Q", len(part)) + part)
        subject.update(challenge + mine)
        subject = subject.digest()
        proof = hmac.digest(secret, b"rpc token 1: dialler knows" + subject, "sha256")
        self.send(PROOF, body=mine + proof)
        answer = self.expect(PROOF)
        if not hmac.compare_digest(answer, hmac.digest(secret, b"rpc token 1: acceptor knows" + subject, "sha256")):
            raise ProtocolError("the server does not know the token")

    def expect(self, wanted):
        while True:
            kind, number, _, _, body, _ = self.frame()
            if kind == PING:
                self.send(PONG, number)
            elif kind == REJECT:
                raise RemoteError(unpack(body))
            elif kind == wanted:
                return body
            else:
                raise ProtocolError(f"frame {kind} in the handshake, and {wanted} was due")

    # Requests (sections 4, 6, 7)

    def submit(self, operation, fields, lane=0, extras=None):
        """Sends a request, in as many frames as it needs, and returns its number."""
        request, self.next_request = self.next_request, self.next_request + 1
        payload = []
        body = pack([operation, extras, fields], payload)
        payload, chunk = b"".join(payload), self.theirs["chunk"]
        if len(body) + len(payload) > self.theirs["max_message"]:
            raise ValueError("larger than the server's max_message")
        bodies = [body[at : at + MAX_BODY] for at in range(0, len(body), MAX_BODY)]
        pieces = [payload[at : at + chunk] for at in range(0, len(payload), chunk)] or [b""]
        # The last piece of the body and the first one of the payload share a frame.
        frames = [(part, b"") for part in bodies[:-1]] + [(bodies[-1], pieces[0])] + [(b"", part) for part in pieces[1:]]
        for number, (part, piece) in enumerate(frames, 1):
            self.send(REQUEST, request, lane, part, piece, more=number < len(frames))
        return request

    def step(self):
        """Handles one frame."""
        kind, request, _, more, body, payload = self.frame()
        if kind in (REPLY, ERROR):
            before = self.partial.pop(request, (kind, b"", b""))
            if before[0] != kind:
                raise ProtocolError("the frames of a message differ in kind")
            body, payload = before[1] + body, before[2] + payload
            if more:
                self.partial[request] = (kind, body, payload)
                return
            if request in self.replies:
                raise ProtocolError(f"request {request} was answered twice")
            self.replies[request] = RemoteError(unpack(body)) if kind == ERROR else unpack(body, payload)
            self.grant(cost(len(body) + len(payload)))
        elif kind == PING:
            self.send(PONG, request)
        elif kind == GO_AWAY:
            self.going_away = RemoteError(unpack(body))
        elif kind == CLOSE:
            self.closed = RemoteError(unpack(body)) if body else True
        elif kind not in (PONG, CREDIT):
            raise ProtocolError(f"frame {kind} is none that a server sends in a session")

    def grant(self, taken):
        self.consumed += taken
        if self.consumed > min(self.ours["window"] // 4, self.ours["window"] - self.ours["max_message"]):
            self.send(CREDIT, body=struct.pack("<IQ", 0, self.consumed))
            self.consumed = 0

    def wait(self, request):
        """Returns the reply to a request, or raises its error."""
        while request not in self.replies:
            if self.closed:
                raise self.closed if isinstance(self.closed, RemoteError) else ConnectionError("the session is closed")
            self.step()
        reply = self.replies.pop(request)
        if isinstance(reply, RemoteError):
            raise reply
        return reply

    def request(self, operation, fields, **options):
        return self.wait(self.submit(operation, fields, **options))

    def function(self, name):
        return self.request(GET_FUNCTION, [name])

    def start(self, function, *arguments, **options):
        return self.submit(CALL, [function.handle, list(arguments)], **options)

    def call(self, name, *arguments, **options):
        """Fetches a function, calls it, and frees it."""
        function = self.function(name)
        try:
            return self.wait(self.start(function, *arguments, **options))
        finally:
            self.free(function)

    def cancel(self, request):
        self.send(CANCEL, request)

    def free(self, *references):
        self.send(FREE, body=struct.pack(f"<{len(references)}Q", *(reference.handle for reference in references)))

    def close(self):
        """Closes the session in order, and returns what the server's `Close` says."""
        self.send(CLOSE)
        while not self.closed:
            self.step()
        self.stream.shutdown(socket.SHUT_WR)
        if self.stream.recv(1):
            raise ProtocolError("bytes behind the server's last frame")
        self.stream.close()
        return self.closed


def connect(address):
    """Connects a socket: `HOST:PORT`, or the path of a Unix socket."""
    if address.startswith("/"):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(address)
    else:
        host, port = address.rsplit(":", 1)
        stream = socket.create_connection((host, int(port)))
    # Longer than any check takes: a server that says nothing is a failure, and no wait without end.
    stream.settimeout(60)
    return stream
