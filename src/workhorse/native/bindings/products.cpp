// The gemm of ops/gemm_vectors.h for PyTorch.

#include <torch/csrc/stable/library.h>

#include "bindings/matrices.h"
#include "ops/gemm_vectors.h"

#ifdef __AVX512F__

namespace workhorse::bindings {
namespace {

// a b + bias.
Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  using gemm_vectors::Operand, gemm_vectors::Product;
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::Float, "workhorse: a and b must be float32");
  Tensor c = result_of(a, b, bias);
  if (c.numel() == 0) return c;
  const Product all{operand<Operand, float>(a, 0),
                    operand<Operand, float>(b, 1),
                    static_cast<float*>(c.mutable_data_ptr()),
                    c.size(1),
                    bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
                    a.size(1)};
  in_grid(c.size(0), c.size(1), gemm_vectors::kHigh, gemm_vectors::kWide,
          [&](int64_t m, int64_t m_end, int64_t n, int64_t n_end) { all.run(m, m_end, n, n_end); });
  return c;
}

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(workhorse, m) { m.def("product(Tensor a, Tensor b, Tensor? bias) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  m.impl("product", TORCH_BOX(&workhorse::bindings::product));
}

#endif  // __AVX512F__
