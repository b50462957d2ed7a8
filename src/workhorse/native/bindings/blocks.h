// The row-wise parts of a transformer block for PyTorch: norm and projections before attention, and everything from
// attention's output to the end of the block. Each part is one pass over the rows in each direction, in which a thread
// takes its rows through all operations in turn. Separate matmuls compute the gradients of weights (sums over rows).
// to products of their own.
#pragma once

#include "bindings/layers.h"
#include "ops/gemm/vectors.h"

namespace workhorse::bindings {

using Tensors = std::vector<Tensor>;
using Biases = std::vector<std::optional<Tensor>>;

inline void check_matrix(const Tensor& x, const Tensor& matrix, int64_t width, int axis) {
  WORKHORSE_CHECK(matrix.dim() == 2 && matrix.is_contiguous() && matrix.scalar_type() == x.scalar_type() &&
                  matrix.size(axis) == width && width > 0,
              "workhorse: the matrices of a block must be contiguous, of one type, and match in shape");
}

inline Tensor matrix_like(const Tensor& x, int64_t columns) {
  return at::empty({x.size(0), columns}, x.options());
}

// y = x Wᵀ + bias.
template <class T>
gemm_vectors::Product<T> projection(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                    const Tensor& y) {
  check_matrix(x, weight, x.size(1), 1);
  WORKHORSE_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == x.scalar_type() &&
                        bias->numel() == weight.size(0)),
              "workhorse: the bias of a block must be contiguous and match its weight");
  const int64_t k = x.size(1);
  return {{{{from<T>(x), k, true}, {from<T>(weight), k, true}, k}},
          into<T>(y),
          y.size(1),
          bias ? from<T>(*bias) : nullptr};
}

// dx = Σ dy W, the gradient of projections of one x.
template <class T>
gemm_vectors::Product<T> projection_backward(const Tensors& dys, const Tensors& weights, const Tensor& dx) {
  gemm_vectors::Product<T> all{{}, into<T>(dx), dx.size(1), nullptr};
  for (size_t i = 0; i < dys.size(); i++) {
    check_matrix(dx, dys[i], dx.size(0), 0);
    check_matrix(dx, weights[i], dys[i].size(1), 0);
    WORKHORSE_CHECK(weights[i].size(1) == dx.size(1), "workhorse: the weights of a block must match in shape");
    const int64_t k = dys[i].size(1);
    all.terms.push_back({{from<T>(dys[i]), k, true}, {from<T>(weights[i]), dx.size(1), false}, k});
  }
  return all;
}

// Returns a function that computes a range of rows of sum = x + other; it does nothing without `other`.
template <class T>
auto adding(const Tensor& x, const std::optional<Tensor>& other, const Tensor& sum) {
  return [a = from<T>(x), b = other ? from<T>(*other) : nullptr, to = into<T>(sum), width = x.size(1)](int64_t row,
                                                                                                 int64_t end) {
    for (int64_t i = row * width; b && i < end * width; i += width) norms::add_row(width, a + i, b + i, to + i);
  };
}

// The norm of x, (rows, width), or of x + branch if given; its moments; the sum if there is a branch; and projections
// of the norm.
inline Tensors norm_project(const Tensor& x, const std::optional<Tensor>& branch,
                            const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double offset,
                            double eps, bool centred, bool rounded, const Tensors& matrices,
                            const Biases& biases) {
  check_like(x, branch);
  const Norm norm(x, weight, bias, {offset, eps, centred, rounded});
  const Tensor total = branch ? at::empty_like(x) : x;
  Tensors made{norm.y, norm.moments};
  if (branch) made.push_back(total);
  const size_t before = made.size();
  for (const Tensor& matrix : matrices) made.push_back(matrix_like(x, matrix.size(0)));
  with_type(x, [&]<class T>(T) {
    std::vector<gemm_vectors::Product<T>> products;
    for (size_t i = 0; i < matrices.size(); i++)
      products.push_back(projection<T>(norm.y, matrices[i], biases[i], made[before + i]));
    const auto normalise = norm.rows<T>(total);
    const auto add = adding<T>(x, branch, total);
    in_rows(x.size(0), [&](int64_t row, int64_t end) {
      add(row, end);
      normalise(row, end);
      for (const auto& product : products) product.run(row, end, 0, product.stride);
    });
  });
  return made;
}

// The gradient of x plus `other`, and in float32 the gradients of the norm's weight and bias, (2, width). `of_y` is
// the gradient of the norm's result from operations other than the projections.
inline std::tuple<Tensor, Tensor> norm_project_backward(const Tensors& above, const Tensors& matrices,
                                                        const Tensor& x, const Tensor& moments,
                                                        const std::optional<Tensor>& weight,
                                                        const std::optional<Tensor>& of_y,
                                                        const std::optional<Tensor>& other, double offset,
                                                        bool centred) {
  check_like(x, of_y);
  const Tensor dx = at::empty_like(x);
  const NormBackward norm(dx, x, moments, weight, other, offset, centred);
  with_type(x, [&]<class T>(T) {
    const auto product = projection_backward<T>(above, matrices, dx);
    const auto differentiate = norm.rows<T>(dx);
    const auto add = adding<T>(dx, of_y, dx);
    in_rows(x.size(0), [&](int64_t row, int64_t end) {
      product.run(row, end, 0, dx.size(1));
      add(row, end);
      differentiate(row, end);
    });
  });
  return {dx, norm.sums.sum(0)};
}

// From the output of attention, (rows, width), to the end of a block:
//   total = x + attended Oᵀ,  y = norm(total),  hidden = y Uᵀ,  out = total + act(hidden) Dᵀ
// If `normed`, out = y + act(hidden) Dᵀ. Returns total, y, the norm's moments and out, then each hidden.
inline Tensors feed(const Tensor& x, const Tensor& attended, const Tensor& out_matrix,
                    const std::optional<Tensor>& out_bias, const std::optional<Tensor>& weight,
                    const std::optional<Tensor>& bias, double offset, double eps, bool centred, bool rounded,
                    const Tensors& matrices, const Biases& biases, const Tensor& down,
                    const std::optional<Tensor>& down_bias, const Tensor& table, std::string_view name,
                    bool normed) {
  check_matrix(x, attended, x.size(0), 0);
  const Tensor total = at::empty_like(x), out = at::empty_like(x);
  const Norm norm(total, weight, bias, {offset, eps, centred, rounded});
  Tensors hidden;
  for (const Tensor& matrix : matrices) hidden.push_back(matrix_like(x, matrix.size(0)));
  const Tensor active = at::empty_like(hidden[0]);
  with_type(x, [&]<class T>(T) {
    const auto output = projection<T>(attended, out_matrix, out_bias, total);
    std::vector<gemm_vectors::Product<T>> products;
    for (size_t i = 0; i < matrices.size(); i++)
      products.push_back(projection<T>(norm.y, matrices[i], biases[i], hidden[i]));
    const auto last = projection<T>(active, down, down_bias, out);
    const auto normalise = norm.rows<T>(total);
    const int64_t width = x.size(1), wide = active.size(1);
    with_activation(x, table, name, [&]<class Same>(auto act, Same) {
      if constexpr (std::is_same_v<T, Same>) {
        const T *first = from<T>(hidden[0]), *second = from<T>(hidden.back());
        T* activated = into<T>(active);
        const auto add = adding<T>(x, total, total), add_last = adding<T>(normed ? norm.y : total, out, out);
        in_rows(x.size(0), [&](int64_t row, int64_t end) {
          output.run(row, end, 0, width);
          add(row, end);
          normalise(row, end);
          for (const auto& product : products) product.run(row, end, 0, wide);
          for (int64_t i = row * wide; i < end * wide; i += wide)
            if (hidden.size() > 1) activations::forward<true>(wide, act, first + i, second + i, activated + i);
            else activations::forward<false>(wide, act, first + i, first + i, activated + i);
          last.run(row, end, 0, width);
          add_last(row, end);
        });
      }
    });
  });
  Tensors made{total, norm.y, norm.moments, out};
  made.insert(made.end(), hidden.begin(), hidden.end());
  return made;
}

// From the gradient of out: the gradients of total (and so of x), of attended and of the norm's weight and
// bias as in norm_project_backward, act(hidden), and the gradient of each hidden.
inline Tensors feed_backward(const Tensor& above, const Tensor& total, const Tensor& moments,
                             const std::optional<Tensor>& weight, double offset, bool centred,
                             const Tensor& out_matrix, const Tensors& matrices, const Tensors& hidden,
                             const Tensor& down, const Tensor& table, std::string_view name, bool normed) {
  check_like(total, above);
  const Tensor dtotal = at::empty_like(total), dattended = matrix_like(total, out_matrix.size(1));
  const std::optional<Tensor> along = above, none;  // the gradient of the residual: of y if `normed`, else of total
  const NormBackward norm(dtotal, total, moments, weight, normed ? none : along, offset, centred);
  const Tensor active = at::empty_like(hidden[0]);
  Tensors slopes;
  for (const Tensor& one : hidden) {
    check_matrix(hidden[0], one, active.size(1), 1);
    slopes.push_back(at::empty_like(one));
  }
  with_type(total, [&]<class T>(T) {
    const auto into_active = projection_backward<T>({above}, {down}, slopes[0]);
    const auto into_norm = projection_backward<T>(slopes, matrices, dtotal);
    const auto into_attended = projection_backward<T>({dtotal}, {out_matrix}, dattended);
    const auto differentiate = norm.rows<T>(dtotal);
    const int64_t wide = active.size(1);
    with_activation(total, table, name, [&]<class Same>(auto act, Same) {
      if constexpr (std::is_same_v<T, Same>) {
        const T *first = from<T>(hidden[0]), *second = from<T>(hidden.back());
        const auto add = adding<T>(dtotal, normed ? along : none, dtotal);
        T *y = into<T>(active), *d_first = into<T>(slopes[0]), *d_second = into<T>(slopes.back());
        in_rows(total.size(0), [&](int64_t row, int64_t end) {
          into_active.run(row, end, 0, wide);
          for (int64_t i = row * wide; i < end * wide; i += wide)
            if (hidden.size() > 1)
              activations::backward<true>(wide, act, d_first + i, first + i, second + i, y + i, d_first + i,
                                          d_second + i);
            else
              activations::backward<false>(wide, act, d_first + i, first + i, first + i, y + i, d_first + i,
                                           d_first + i);
          into_norm.run(row, end, 0, dtotal.size(1));
          add(row, end);
          differentiate(row, end);
          into_attended.run(row, end, 0, dattended.size(1));
        });
      }
    });
  });
  Tensors made{dtotal, dattended, norm.sums.sum(0), active};
  made.insert(made.end(), slopes.begin(), slopes.end());
  return made;
}

}  // namespace workhorse::bindings
