// Matrices of a gemm: operands in memory, and the division of the result among the threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>

#include "bindings/refuse.h"

namespace workhorse::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& a, const Tensor& b) {
  WORKHORSE_CHECK(a.dim() == 2 && b.dim() == 2, "workhorse: a and b must have two axes");
  WORKHORSE_CHECK(a.is_cpu() && b.is_cpu() && b.scalar_type() == a.scalar_type() && a.size(1) == b.size(0) &&
                      a.size(1) > 0,
                  "workhorse: a and b must be on the CPU, of one type, and match in shape");
}

// Allocates the result of a b + bias after checking that these can be multiplied.
inline Tensor result_of(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  check(a, b);
  const int64_t columns = b.size(1);
  if (bias)
    WORKHORSE_CHECK(bias->is_cpu() && bias->scalar_type() == a.scalar_type() && bias->dim() == 1 &&
                        bias->size(0) == columns && bias->stride(0) == 1,
                    "workhorse: bias must be on the CPU, of the type of a, one element for each column");
  return torch::stable::new_empty(a, {a.size(0), columns});
}

// A tensor of elements T as an operand of a gemm. The lanes of the operand are its rows (0) or columns (1).
template <class Operand, class T>
Operand operand(const Tensor& x, int lane_axis) {
  const int k_axis = 1 - lane_axis;
  const T* at = static_cast<const T*>(x.const_data_ptr());
  if (x.stride(k_axis) == 1 || x.size(k_axis) == 1) return {at, x.stride(lane_axis), true};
  WORKHORSE_CHECK(x.stride(lane_axis) == 1 || x.size(lane_axis) == 1,
                  "workhorse: the rows or the columns of a matrix must be contiguous");
  return {at, x.stride(k_axis), false};
}

struct Share {
  int64_t number, of;
};

// Calls f(share) once per thread. A share holds the number of threads, which a thread may not know yet inside f.
template <class F>
void in_shares(F f) {
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t share, int64_t end) {
    for (; share < end; share++) f(Share{share, threads});
  });
}

// Calls f(row, end row, column, end column) for each share of a matrix. The shares form a grid with one cell for each
// share. Of all such grids it is the one whose slowest cell takes the least time. Borders are multiples of the steps.
template <class F>
void in_grid(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step, Share share, F f) {
  constexpr int64_t packing = 8;  // packing a row or column costs as much as this many dot products of it
  const auto [number, parts] = share;
  const auto steps = [](int64_t size, int64_t step) { return (size + step - 1) / step; };
  const auto largest = [&](int64_t size, int64_t step, int64_t parts) {
    return steps(steps(size, step), parts) * step;
  };
  const auto time = [&](int64_t high) {
    const int64_t m = largest(rows, row_step, high), n = largest(columns, column_step, parts / high);
    return m * n + packing * (m + n);
  };
  int64_t high = parts;  // along the rows
  for (int64_t h = 1; h < parts; h++)
    if (parts % h == 0 && time(h) < time(high)) high = h;
  const int64_t wide = parts / high;
  const auto border = [&](int64_t size, int64_t step, int64_t parts, int64_t i) {
    return std::min(size, steps(size, step) * i / parts * step);
  };
  const int64_t m = border(rows, row_step, high, number / wide);
  const int64_t m_end = border(rows, row_step, high, number / wide + 1);
  const int64_t n = border(columns, column_step, wide, number % wide);
  const int64_t n_end = border(columns, column_step, wide, number % wide + 1);
  if (m < m_end && n < n_end) f(m, m_end, n, n_end);
}

}  // namespace workhorse::bindings
