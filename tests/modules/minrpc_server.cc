// A server over TCP around the minimal runtime of TVM (`minrpc_server.h`), which the servers of small boards are made of.
// It serves one client, and ends. Built and run by rpc-server/tests/server/tvm_minimal.rs: TVM's sources are those of the
// package `apache-tvm`.
//
//     minrpc_server            writes its port, as text, to its standard output

#include <arpa/inet.h>
#include <minrpc_server.h>
#include <sys/socket.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int32_t kMagic = 0xff271;

class SocketIO {
 public:
  explicit SocketIO(int socket) : socket_(socket) {}

  void MessageStart(size_t) {}
  void MessageDone() {}

  ssize_t PosixRead(uint8_t* data, size_t len) { return read(socket_, data, len); }

  ssize_t PosixWrite(const uint8_t* data, size_t len) { return write(socket_, data, len); }

  void Close() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

  [[noreturn]] void Exit(int code) { exit(code); }

  void ReadAll(void* data, size_t len) {
    for (size_t done = 0; done < len;) {
      ssize_t count = PosixRead(static_cast<uint8_t*>(data) + done, len - done);
      if (count <= 0) Exit(11);
      done += count;
    }
  }

  void WriteAll(const std::string& data) {
    for (size_t done = 0; done < data.size();) {
      ssize_t count = PosixWrite(reinterpret_cast<const uint8_t*>(data.data()) + done, data.size() - done);
      if (count <= 0) Exit(12);
      done += count;
    }
  }

 private:
  int socket_;
};

std::string Number(int32_t number) { return std::string(reinterpret_cast<const char*>(&number), sizeof(number)); }

// The handshake, which the minimal runtime leaves to what is around it.
void Greet(SocketIO* io) {
  int32_t magic = 0, len = 0;
  io->ReadAll(&magic, sizeof(magic));
  io->ReadAll(&len, sizeof(len));
  if (magic != kMagic || len < 0 || len > 1024) io->Exit(10);
  std::string key(len, '\0');
  io->ReadAll(key.data(), len);
  const std::string own = "server:board";
  io->WriteAll(Number(kMagic) + Number(own.size()) + own);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace ffi = tvm::ffi;
  ffi::reflection::GlobalDef()
      .def("board.add", [](int64_t a, int64_t b) { return a + b; })
      .def("board.join", [](ffi::String a, ffi::Bytes b) { return std::string(a) + ":" + std::string(b.data(), b.size()); })
      .def("board.fail", [](ffi::String text) { TVM_FFI_THROW(ValueError) << std::string(text); })
      .def("board.adder", [](int64_t a) { return ffi::Function::FromTyped([a](int64_t b) { return a + b; }); })
      .def("board.double", [](DLTensor* x) {
        float* data = reinterpret_cast<float*>(static_cast<char*>(x->data) + x->byte_offset);
        for (int64_t i = 0; i < x->shape[0]; ++i) data[i] *= 2;
      });
}

int main() {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t len = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), len) != 0 || listen(listener, 1) != 0) return 1;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &len) != 0) return 1;
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  SocketIO io(accept(listener, nullptr, nullptr));
  Greet(&io);
  tvm::runtime::MinRPCServer<SocketIO> server(&io);
  while (server.ProcessOnePacket()) {
  }
  return 0;
}
