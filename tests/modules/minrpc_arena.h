// The memory of TVM's minimal runtime (`minrpc_server.h`), which includes a header for it that the package `apache-tvm` lacks.
// This one has what is used of that: each request is one page, which is freed with the next one.
#ifndef RPC_TESTS_MINRPC_ARENA_H_
#define RPC_TESTS_MINRPC_ARENA_H_

#include <cstddef>

namespace tvm {
namespace support {

struct ArenaPageHeader {
  ArenaPageHeader* next;
  size_t size;
  size_t offset;
};

template <typename PageAllocator>
class GenericArena {
 public:
  explicit GenericArena(PageAllocator allocator) : allocator_(allocator) {}
  GenericArena(const GenericArena&) = delete;
  ~GenericArena() { FreeAll(); }

  template <typename T>
  T* allocate_(int count) {
    ArenaPageHeader* page = allocator_.allocate(sizeof(ArenaPageHeader) + sizeof(T) * static_cast<size_t>(count));
    page->next = pages_;
    pages_ = page;
    return reinterpret_cast<T*>(page + 1);
  }

  void RecycleAll() { FreeAll(); }

  void FreeAll() {
    while (pages_ != nullptr) {
      ArenaPageHeader* next = pages_->next;
      allocator_.deallocate(pages_);
      pages_ = next;
    }
  }

 private:
  PageAllocator allocator_;
  ArenaPageHeader* pages_{nullptr};
};

}  // namespace support
}  // namespace tvm

#endif  // RPC_TESTS_MINRPC_ARENA_H_
