// A matrix divided among the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace workhorse::bindings {

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
