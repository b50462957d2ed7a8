// The matrices of a gemm: operands in memory, and the result divided among the threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

namespace workhorse::bindings {

// A tensor of numbers T, of either of PyTorch's interfaces, as the operand of a gemm whose lanes are its rows
// (0) or columns (1).
template <class Operand, class T, class Tensor>
Operand operand(const Tensor& x, int lane_axis) {
  const int k_axis = 1 - lane_axis;
  const T* at = static_cast<const T*>(x.const_data_ptr());
  if (x.stride(k_axis) == 1 || x.size(k_axis) == 1) return {at, x.stride(lane_axis), true};
  STD_TORCH_CHECK(x.stride(lane_axis) == 1 || x.size(lane_axis) == 1,
                  "workhorse: the rows or the columns of a matrix must be contiguous");
  return {at, x.stride(k_axis), false};
}

// Calls f(row, end of rows, column, end of columns) for the parts of a matrix, on a thread each: those of the
// grid whose parts read the fewest rows of A and columns of B. Borders are multiples of the steps.
template <class F>
void in_grid(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step, F f) {
  const int64_t threads = torch::stable::get_num_threads();
  int64_t high = threads;  // parts along the rows
  for (int64_t h = 1; h <= threads; h++)
    if (threads % h == 0 &&
        rows / h + columns * h / threads < rows / high + columns * high / threads)
      high = h;
  const int64_t wide = threads / high;
  const auto border = [](int64_t size, int64_t step, int64_t parts, int64_t i) {
    return std::min(size, (size + step - 1) / step * i / parts * step);
  };
  torch::stable::parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) {
      const int64_t m = border(rows, row_step, high, t / wide);
      const int64_t m_end = border(rows, row_step, high, t / wide + 1);
      const int64_t n = border(columns, column_step, wide, t % wide);
      const int64_t n_end = border(columns, column_step, wide, t % wide + 1);
      if (m < m_end && n < n_end) f(m, m_end, n, n_end);
    }
  });
}

}  // namespace workhorse::bindings
