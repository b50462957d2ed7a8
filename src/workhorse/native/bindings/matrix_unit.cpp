// The gemm of ops/gemm/tiles.h for PyTorch.

#include <torch/csrc/stable/library.h>

#include <optional>

#include "bindings/matrices.h"
#include "ops/gemm/tiles.h"

#ifdef __AMX_BF16__

namespace workhorse::bindings {
namespace {

constexpr int64_t kFewRows = 256;

template <class T>
void divide(const gemm_tiles::Product<T>& product, int64_t rows, int64_t columns) {
  in_shares([&](Share share) {
    in_grid(rows, columns, gemm_tiles::kPanel, gemm_tiles::kPanel, share,
            [&](int64_t m, int64_t m_end, int64_t n, int64_t n_end) { product.run(m, m_end, n, n_end); });
  });
}

template <class T>
void multiply_into(const Tensor& c, const Tensor& a, const Tensor& b, const Tensor* bias) {
  const int64_t rows = c.size(0), columns = c.size(1), k = a.size(1);
  const auto left = operand<gemm_tiles::Operand<T>, T>(a, 0), right = operand<gemm_tiles::Operand<T>, T>(b, 1);
  T* const at = static_cast<T*>(c.mutable_data_ptr());
  const T* const added = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  // A left operand in bfloat16 can be loaded in place. If C has few rows, B should be the left one. In float32,
  // k down the columns costs a transpose for a left operand but not for a right one: the smaller should be left.
  const bool transposed = gemm_tiles::kParts<T> == 1
                              ? left.along && right.along && rows <= kFewRows && rows < columns
                              : !left.along && !right.along && rows > columns;
  if (transposed)
    divide<T>({right, left, {at, columns, added, true}, k}, columns, rows);
  else
    divide<T>({left, right, {at, columns, added, false}, k}, rows, columns);
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  const ScalarType type = a.scalar_type();
  WORKHORSE_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float,
                  "workhorse: a and b must be bfloat16 or float32");
  Tensor c = result_of(a, b, bias);
  if (c.numel() == 0) return c;
  const auto into = type == ScalarType::Float ? multiply_into<float> : multiply_into<BFloat16>;
  into(c, a, b, bias ? &*bias : nullptr);
  return c;
}

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(workhorse, m) {
  if (workhorse::tiles_allowed()) m.def("gemm(Tensor a, Tensor b, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  if (workhorse::tiles_allowed()) m.impl("gemm", TORCH_BOX(&workhorse::bindings::gemm));
}

#endif  // __AMX_BF16__
