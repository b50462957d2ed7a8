// The heap of ops/tensor_heap.h as PyTorch's allocator on the CPU.

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/stable/library.h>

#include "ops/tensor_heap.h"

namespace workhorse::bindings {
namespace {

// Minimum size in bytes; smaller blocks come from the C library.
constexpr size_t kLarge = size_t{1} << 16;

// Never destroyed, because tensors may outlive all other objects.
heap::TensorHeap& tensors() {
  static auto* one = new heap::TensorHeap;
  return *one;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes < kLarge ? nullptr : tensors().take(bytes);
    if (data == nullptr) {
      data = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    } else {
      c10::profiledCPUMemoryReporter().New(data, bytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) {
    if (tensors().holds(data)) {
      c10::profiledCPUMemoryReporter().Delete(data);
      tensors().free(data);
    } else if (data != nullptr) {
      c10::GetDefaultCPUAllocator()->raw_deallocate(data);
    }
  }
};

// Starts or stops allocating large tensors in the heap; false if address space cannot be reserved for it.
bool keep(bool keeps) {
  static auto* ours = new Allocator;
  static c10::Allocator* before = nullptr;
  if (keeps && before == nullptr) {
    if (!tensors().reserve()) return false;
    tensors().keep(true);
    before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(ours);
  } else if (!keeps && before != nullptr) {
    c10::SetCPUAllocator(before);
    before = nullptr;
    tensors().keep(false);
  }
  return true;
}

void give_back() { tensors().give_back(); }

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY(workhorse_heap, m) {
  m.def("keep(bool keeps) -> bool");
  m.def("give_back() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(workhorse_heap, CompositeExplicitAutograd, m) {
  m.impl("keep", TORCH_BOX(&workhorse::bindings::keep));
  m.impl("give_back", TORCH_BOX(&workhorse::bindings::give_back));
}
