// The matrices of a gemm: operands in memory, and the result divided among the threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>

namespace workhorse::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "workhorse: a and b must have two axes");
  STD_TORCH_CHECK(a.is_cpu() && b.is_cpu() && b.scalar_type() == a.scalar_type() && a.size(1) == b.size(0) &&
                      a.size(1) > 0,
                  "workhorse: a and b must be on the CPU, of one type, and match in shape");
}

// Room for a b + bias, which may be multiplied if this returns.
inline Tensor result_of(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  check(a, b);
  const int64_t columns = b.size(1);
  if (bias)
    STD_TORCH_CHECK(bias->is_cpu() && bias->scalar_type() == a.scalar_type() && bias->dim() == 1 &&
                        bias->size(0) == columns && bias->stride(0) == 1,
                    "workhorse: bias must be on the CPU, of the type of a, one number for each column");
  return torch::stable::new_empty(a, {a.size(0), columns});
}

// A tensor of numbers T as the operand of a gemm whose lanes are its rows (0) or columns (1).
template <class Operand, class T>
Operand operand(const Tensor& x, int lane_axis) {
  const int k_axis = 1 - lane_axis;
  const T* at = static_cast<const T*>(x.const_data_ptr());
  if (x.stride(k_axis) == 1 || x.size(k_axis) == 1) return {at, x.stride(lane_axis), true};
  STD_TORCH_CHECK(x.stride(lane_axis) == 1 || x.size(lane_axis) == 1,
                  "workhorse: the rows or the columns of a matrix must be contiguous");
  return {at, x.stride(k_axis), false};
}

// Calls f(thread) on every thread.
template <class F>
void in_threads(F f) {
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t thread, int64_t end) {
    for (; thread < end; thread++) f(thread);
  });
}

// Calls f(row, end of rows, column, end of columns) for one thread's part of a matrix: of a grid with as many
// parts as there are threads, that in which the largest part takes the least time. Borders are multiples of
// the steps.
template <class F>
void in_grid(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step, int64_t thread, F f) {
  constexpr int64_t packing = 8;  // putting a row or column in order takes as long as so many products of it
  const int64_t threads = torch::stable::get_num_threads();
  const auto steps = [](int64_t size, int64_t step) { return (size + step - 1) / step; };
  const auto largest = [&](int64_t size, int64_t step, int64_t parts) {
    return steps(steps(size, step), parts) * step;
  };
  const auto time = [&](int64_t high) {
    const int64_t m = largest(rows, row_step, high), n = largest(columns, column_step, threads / high);
    return m * n + packing * (m + n);
  };
  int64_t high = threads;  // parts along the rows
  for (int64_t h = 1; h < threads; h++)
    if (threads % h == 0 && time(h) < time(high)) high = h;
  const int64_t wide = threads / high;
  const auto border = [&](int64_t size, int64_t step, int64_t parts, int64_t i) {
    return std::min(size, steps(size, step) * i / parts * step);
  };
  const int64_t m = border(rows, row_step, high, thread / wide);
  const int64_t m_end = border(rows, row_step, high, thread / wide + 1);
  const int64_t n = border(columns, column_step, wide, thread % wide);
  const int64_t n_end = border(columns, column_step, wide, thread % wide + 1);
  if (m < m_end && n < n_end) f(m, m_end, n, n_end);
}

}  // namespace workhorse::bindings
