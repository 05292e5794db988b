// Functions in C++ against TVM-FFI's headers, with metadata, for the tests of modules.
#define TVM_FFI_DLL_EXPORT_INCLUDE_METADATA 1
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <string>
#include <thread>

namespace ffi = tvm::ffi;

namespace {

int64_t Add(int64_t a, int64_t b) { return a + b; }

void AddTensors(ffi::TensorView x, ffi::TensorView y, ffi::TensorView z) {
  TVM_FFI_CHECK(x.ndim() == 2 && y.ndim() == 2 && z.ndim() == 2, ValueError) << "expected matrices";
  for (int64_t i = 0; i < z.size(0); ++i) {
    for (int64_t j = 0; j < z.size(1); ++j) {
      auto at = [&](ffi::TensorView t) {
        return static_cast<float*>(t.data_ptr()) + i * t.stride(0) + j * t.stride(1);
      };
      *at(z) = *at(x) + *at(y);
    }
  }
}

ffi::Any Identity(ffi::Any value) { return value; }

ffi::Tensor IdentityTensor(ffi::Tensor tensor) { return tensor; }

// A new tensor of the environment's memory: the squares of x.
ffi::Tensor Squares(ffi::TensorView x) {
  DLTensor like = {};
  int64_t shape[1] = {x.size(0)};
  like.device = DLDevice{kDLCPU, 0};
  like.ndim = 1;
  like.dtype = DLDataType{kDLFloat, 32, 1};
  like.shape = shape;
  ffi::Tensor y = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(shape, 1), like.dtype, like.device);
  for (int64_t i = 0; i < shape[0]; ++i) {
    float value = static_cast<float*>(x.data_ptr())[i];
    static_cast<float*>(y.data_ptr())[i] = value * value;
  }
  return y;
}

struct HeapAllocator {
  void AllocData(DLTensor* tensor) { tensor->data = new float[ffi::GetDataSize(*tensor) / 4 + 1]; }
  void FreeData(DLTensor* tensor) { delete[] static_cast<float*>(tensor->data); }
};

// A new tensor of the module's own memory: 0, 1, 2, ...
ffi::Tensor Count(int64_t n) {
  ffi::Tensor y = ffi::Tensor::FromNDAlloc(HeapAllocator(), ffi::Shape({n}), DLDataType{kDLFloat, 32, 1}, DLDevice{kDLCPU, 0});
  for (int64_t i = 0; i < n; ++i) static_cast<float*>(y.data_ptr())[i] = static_cast<float>(i);
  return y;
}

// One tensor of the module's own, and views of its two halves, in the order that is asked for.
ffi::Array<ffi::Tensor> Parts(ffi::String names) {
  static ffi::Tensor whole = Count(4);
  auto half = [&](int64_t offset) {
    DLTensor view = *whole.GetDLTensorPtr();
    static int64_t shape[1] = {2}, strides[1] = {1};
    view.data = static_cast<float*>(view.data) + offset;
    view.shape = shape;
    view.strides = strides;
    struct Shared {
      ffi::Tensor owner;
      void* data;
      void AllocData(DLTensor* tensor) { tensor->data = data; }
      void FreeData(DLTensor*) {}
    };
    return ffi::Tensor::FromNDAlloc(Shared{whole, view.data}, ffi::Shape({2}), view.dtype, view.device);
  };
  ffi::Array<ffi::Tensor> parts;
  std::string rest(names.data(), names.size());
  while (!rest.empty()) {
    size_t end = std::min(rest.find(','), rest.size());
    std::string name = rest.substr(0, end);
    parts.push_back(name == "whole" ? whole : half(name == "left" ? 0 : 2));
    rest.erase(0, end + 1);
  }
  return parts;
}

int64_t ReferencesOf(ffi::Tensor tensor) { return tensor.use_count(); }

double SumOfAll(ffi::Array<ffi::Tensor> tensors) {
  double sum = 0;
  for (const ffi::Tensor& tensor : tensors) {
    for (int64_t i = 0; i < tensor.numel(); ++i) sum += static_cast<const float*>(tensor.data_ptr())[i];
  }
  return sum;
}

ffi::Map<ffi::String, ffi::Any> Describe(ffi::Map<ffi::String, ffi::Any> map) {
  ffi::Map<ffi::String, ffi::Any> described;
  for (const auto& [key, value] : map) described.Set(key, value.GetTypeKey());
  return described;
}

ffi::Any Apply(ffi::Function function, ffi::Any value) { return function(value); }

// Calls with a view of x, and then reads x.
double ApplyToTensor(ffi::Function function, ffi::TensorView x) {
  function(x);
  return static_cast<const float*>(x.data_ptr())[0];
}

// With a view of memory that is the module's own: 2 by 2, of every second column.
ffi::Any ApplyToOwnView(ffi::Function function) {
  float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  int64_t shape[2] = {2, 2}, strides[2] = {4, 2};
  DLTensor view = {};
  view.data = data;
  view.device = DLDevice{kDLCPU, 0};
  view.ndim = 2;
  view.dtype = DLDataType{kDLFloat, 32, 1};
  view.shape = shape;
  view.strides = strides;
  return function(&view);
}

ffi::Function Adder(int64_t n) {
  return ffi::Function::FromTyped([n](int64_t x) { return x + n; });
}

ffi::Any CallOnThread(ffi::Function function) {
  ffi::Any result;
  ffi::String message;
  std::thread([&] {
    try {
      result = function();
    } catch (const ffi::Error& error) {
      message = error.message();
    }
  }).join();
  TVM_FFI_CHECK(message.size() == 0, RuntimeError) << message;
  return result;
}

int64_t Length(const char* text) { return static_cast<int64_t>(std::char_traits<char>::length(text)); }

void Raise(ffi::String kind, ffi::String message) { throw ffi::Error(kind, message, ""); }

int64_t Stream(DLDevice device) {
  return reinterpret_cast<intptr_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

ffi::String NotText() { return ffi::String("\xff\xfe plainly not UTF-8", 20); }

ffi::List<ffi::Any> ListOf(ffi::Any a, ffi::Any b) { return ffi::List<ffi::Any>({a, b}); }

ffi::Any Nested(int64_t depth) {
  ffi::Any value = nullptr;
  for (int64_t i = 0; i < depth; ++i) value = ffi::Array<ffi::Any>({value});
  return value;
}

// Forgotten at the end of the process.
ffi::Any* held = nullptr;
void Hold(ffi::Any value) { held = new ffi::Any(value); }
ffi::Any Held() { return held == nullptr ? ffi::Any() : *held; }
void LetGo() {
  delete held;
  held = nullptr;
}

class CounterObj : public ffi::Object {
 public:
  int64_t count = 0;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tests.Counter", CounterObj, ffi::Object);
};

ffi::ObjectRef Counter() { return ffi::ObjectRef(ffi::make_object<CounterObj>()); }

int64_t Increment(ffi::ObjectRef counter) {
  auto* object = const_cast<CounterObj*>(counter.as<CounterObj>());
  TVM_FFI_CHECK(object != nullptr, TypeError) << "expected a counter";
  return ++object->count;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, Add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_tensors, AddTensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(identity, Identity);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(identity_tensor, IdentityTensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(squares, Squares);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count, Count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(parts, Parts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(references_of, ReferencesOf);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_of_all, SumOfAll);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, Describe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(apply, Apply);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(apply_to_tensor, ApplyToTensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(apply_to_own_view, ApplyToOwnView);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adder, Adder);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(call_on_thread, CallOnThread);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(length, Length);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raise, Raise);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream, Stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(not_text, NotText);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(list_of, ListOf);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nested, Nested);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hold, Hold);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(held, Held);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(let_go, LetGo);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counter, Counter);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(increment, Increment);
