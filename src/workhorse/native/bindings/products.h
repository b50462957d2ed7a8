// The gemm of ops/gemm_vectors.h for PyTorch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

#include "bindings/layers.h"
#include "bindings/matrices.h"
#include "ops/gemm_vectors.h"

namespace workhorse::bindings {

#ifdef __AVX512F__

// a b + bias.
inline Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.size(1) > 0,
              "workhorse: a and b must be matrices that match in shape");
  TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat,
              "workhorse: a and b must be float32");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->dim() == 1 &&
                        bias->size(0) == b.size(1) && bias->stride(0) == 1),
              "workhorse: bias must be float32, one number for each column");
  const int64_t rows = a.size(0), columns = b.size(1);
  const Tensor c = at::empty({rows, columns}, a.options());
  if (rows * columns == 0) return c;
  const gemm_vectors::Product all{operand<gemm_vectors::Operand, float>(a, 0),
                                  operand<gemm_vectors::Operand, float>(b, 1), into<float>(c), columns,
                                  bias ? from<float>(*bias) : nullptr, a.size(1)};
  in_grid(rows, columns, gemm_vectors::kHigh, gemm_vectors::kWide,
          [&](int64_t m, int64_t m_end, int64_t n, int64_t n_end) { all.run(m, m_end, n, n_end); });
  return c;
}

#else

inline Tensor product(const Tensor&, const Tensor&, const std::optional<Tensor>&) {
  TORCH_CHECK(false, "workhorse: products need vectors of 64 bytes (AVX512)");
}

#endif

}  // namespace workhorse::bindings
