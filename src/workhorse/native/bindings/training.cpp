// Training operators on a CPU that PyTorch lacks: norms, activations and the loss in one pass each, attention by gemms
// whose blocks stay in the CPU's cache, and updates of weights, in float32 or bfloat16 with low bits
// (optim/master_weights.py).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/stable/ops.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bindings/blocks.h"
#include "bindings/layers.h"
#include "ops/training/adamw.h"
#include "ops/training/attention_float32.h"
#include "ops/training/attention_pairs.h"
#include "ops/training/muon.h"

namespace workhorse::bindings {
namespace {

using at::Tensor;

// The heads of a tensor (batch, heads, seq, width).
template <class T>
struct Heads {
  T* at;
  int64_t batch, head, row;

  explicit Heads(const Tensor& t)
      : at(const_cast<T*>(from<T>(t))), batch(t.stride(0)), head(t.stride(1)), row(t.stride(2)) {}

  attention::Head<T> operator()(int64_t b, int64_t h) const { return {at + b * batch + h * head, row}; }
};

struct Sizes {
  int64_t batch, heads, seq, width;

  explicit Sizes(std::initializer_list<Tensor> tensors) {
    const Tensor& first = *tensors.begin();
    const bool wide = first.scalar_type() == at::kFloat;
    const int64_t even = wide ? 1 : 2;  // elements in a word; one rule for every CPU
    for (const Tensor& t : tensors)
      WORKHORSE_CHECK(t.dim() == 4 && t.scalar_type() == (wide ? at::kFloat : at::kBFloat16) &&
                      t.sizes() == first.sizes() && t.stride(3) == 1 && t.stride(2) % even == 0,
                  "workhorse: attention needs tensors of one shape and type, with rows of whole words");
    batch = first.size(0), heads = first.size(1), seq = first.size(2), width = first.size(3);
    WORKHORSE_CHECK(seq % even == 0 && width % even == 0,
                "workhorse: attention in bfloat16 needs an even length and width");
  }

  // Allocates in the memory order (batch, seq, heads, width) of the projections before and after attention.
  Tensor make(const Tensor& like) const {
    return at::empty({batch, seq, heads, width}, like.options()).transpose(1, 2);
  }

  // Calls f(kernel of the thread, batch, head) for every head.
  template <class Kernel, class F>
  void each_head(F f) const {
    torch::stable::parallel_for(0, batch * heads, 1, [&](int64_t begin, int64_t end) {
      Kernel kernel(seq, width);
      for (int64_t i = begin; i < end; ++i) f(kernel, i / heads, i % heads);
    });
  }
};

// Attention with elements T on this CPU.
template <class T>
using KernelOf =
    std::conditional_t<kPairs && std::is_same_v<T, BFloat16>, attention::Pairs, attention::Float32>;

// How each head computes its scores. `slopes`: of ALiBi, (heads,) float32, or none.
struct Scorings {
  float scale;
  bool causal;
  const float* slopes;

  Scorings(const Sizes& sizes, double factor, bool only_earlier, const std::optional<Tensor>& given)
      : scale(float(factor)), causal(only_earlier), slopes(given ? from<float>(*given) : nullptr) {
    WORKHORSE_CHECK(!given || (causal && given->scalar_type() == at::kFloat && given->is_contiguous() &&
                               given->numel() == sizes.heads),
                    "workhorse: slopes need causal attention, and a contiguous float32 for each head");
  }

  attention::Scoring operator()(int64_t head) const { return {scale, causal, slopes ? slopes[head] : 0.0f}; }
};

// The output, and the log-sum-exp of each query, (batch, heads, seq).
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                                     bool causal, const std::optional<Tensor>& slopes) {
  const Sizes sizes({q, k, v});
  const Scorings how(sizes, scale, causal, slopes);
  const Tensor y = sizes.make(q);
  const Tensor lse = at::empty({sizes.batch, sizes.heads, sizes.seq}, q.options().dtype(at::kFloat));
  float* sums = into<float>(lse);
  with_type(q, [&]<class T>(T) {
    const Heads<T> of_q(q), of_k(k), of_v(v), of_y(y);
    sizes.each_head<KernelOf<T>>([&](auto& kernel, int64_t b, int64_t h) {
      kernel.forward(of_q(b, h), of_k(b, h), of_v(b, h), how(h), of_y(b, h),
                     sums + (b * sizes.heads + h) * sizes.seq);
    });
  });
  return {y, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& y,
                                                      const Tensor& dy, const Tensor& lse,
                                                      double scale, bool causal,
                                                      const std::optional<Tensor>& slopes) {
  const Sizes sizes({q, k, v, y, dy});
  const Scorings how(sizes, scale, causal, slopes);
  WORKHORSE_CHECK(lse.is_contiguous() && lse.numel() == sizes.batch * sizes.heads * sizes.seq,
              "workhorse: lse must be contiguous, (batch, heads, seq)");
  const Tensor dq = sizes.make(q), dk = sizes.make(k), dv = sizes.make(v);
  const float* sums = from<float>(lse);
  with_type(q, [&]<class T>(T) {
    const Heads<T> of_q(q), of_k(k), of_v(v), of_y(y), of_dy(dy), of_dq(dq), of_dk(dk), of_dv(dv);
    sizes.each_head<KernelOf<T>>([&](auto& kernel, int64_t b, int64_t h) {
      kernel.backward(of_q(b, h), of_k(b, h), of_v(b, h), of_y(b, h), of_dy(b, h),
                      sums + (b * sizes.heads + h) * sizes.seq, how(h), of_dq(b, h), of_dk(b, h), of_dv(b, h));
    });
  });
  return {dq, dk, dv};
}

bool is_narrow(const Tensor& x) {
  WORKHORSE_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat,
              "workhorse: an update needs bfloat16 or float32");
  return x.scalar_type() == at::kBFloat16;
}

weights::Split split_weights(const Tensor& weight, const Tensor& low_bits) {
  WORKHORSE_CHECK(weight.scalar_type() == at::kBFloat16 && low_bits.scalar_type() == at::kShort &&
                  weight.is_contiguous() && low_bits.is_contiguous() &&
                  weight.numel() == low_bits.numel(),
              "workhorse: a split weight must be contiguous, bfloat16 with int16 low bits");
  return {static_cast<uint16_t*>(weight.mutable_data_ptr()),
          static_cast<int16_t*>(low_bits.mutable_data_ptr())};
}

// Calls f with the elements of a tensor, which may be bfloat16 or float32.
template <class F>
void with_numbers(const Tensor& x, F f) {
  WORKHORSE_CHECK(x.is_contiguous(), "workhorse: an update needs contiguous tensors");
  void* at = const_cast<void*>(x.const_data_ptr());
  if (is_narrow(x)) return f(weights::Narrow{static_cast<uint16_t*>(at)});
  f(weights::Wide{static_cast<float*>(at)});
}

// All weights are float32 or, if low bits are given, all weights are split.
void adamw_(at::TensorList weights, at::TensorList low_bits, at::TensorList gradients,
            at::TensorList means, at::TensorList mean_squares, at::TensorList updates, double shrink,
            double rate, double beta1, double beta2, double eps, double weight_decay) {
  constexpr int64_t kPart = 1 << 14;
  struct Part {
    size_t tensor;
    int64_t begin, end;
  };
  std::vector<Part> parts;
  for (const auto& of_each : {gradients, means, mean_squares, updates})
    WORKHORSE_CHECK(of_each.size() == weights.size(), "workhorse: weights and their optimizer states differ in number");
  for (size_t t = 0; t < weights.size(); t++) {
    WORKHORSE_CHECK(updates[t].scalar_type() == at::kFloat && updates[t].numel() == 1,
                "workhorse: a count of updates must be one float32 element");
    const int64_t n = weights[t].numel();
    for (const Tensor& x : {gradients[t], means[t], mean_squares[t]})
      WORKHORSE_CHECK(x.numel() == n, "workhorse: a gradient and its means must have the size of the weight");
    WORKHORSE_CHECK(is_narrow(weights[t]) != low_bits.empty() && weights[t].is_contiguous(),
                "workhorse: a weight must be contiguous, float32 or bfloat16 with low bits");
    WORKHORSE_CHECK(!is_narrow(mean_squares[t]) && mean_squares[t].is_contiguous(),
                "workhorse: mean squares must be contiguous and float32");
    for (int64_t i = 0; i < n; i += kPart) parts.push_back({t, i, std::min(i + kPart, n)});
  }
  std::vector<double> counts;
  for (const Tensor& count : updates) counts.push_back(*into<float>(count) += 1);
  torch::stable::parallel_for(0, parts.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Part& part = parts[i];
      const size_t t = part.tensor;
      const adamw::Update update{float(shrink),
                                 float(1 - rate * weight_decay),
                                 float(1 - beta1),
                                 float(1 - beta2),
                                 float(rate / (1 - std::pow(beta1, counts[t]))),
                                 float(1 / std::sqrt(1 - std::pow(beta2, counts[t]))),
                                 float(eps)};
      float* const squares = mean_squares[t].mutable_data_ptr<float>();
      with_numbers(gradients[t], [&](auto g) {
        with_numbers(means[t], [&](auto m) {
          if (low_bits.empty())
            update(weights::Wide{weights[t].mutable_data_ptr<float>()}, g, m, squares, part.begin, part.end);
          else
            update(split_weights(weights[t], low_bits[t]), g, m, squares, part.begin, part.end);
        });
      });
    }
  });
}

// Updates Muon's momenta, and returns the direction of each matrix, of norm 1, as (matrices, shorter
// side, longer side). `momenta` holds the momenta of all parameters; a parameter may be a stack of matrices.
Tensor muon_directions(at::TensorList gradients, Tensor& momenta, double shrink, double momentum,
                       bool nesterov) {
  const int64_t rows = momenta.size(-2), columns = momenta.size(-1), size = rows * columns;
  const int64_t stack = momenta.numel() / size / int64_t(gradients.size());
  WORKHORSE_CHECK(!is_narrow(momenta) && momenta.is_contiguous() && stack * size == gradients[0].numel(),
              "workhorse: momenta must be contiguous and float32, one for each gradient");
  const Tensor made = at::empty({momenta.numel() / size, std::min(rows, columns),
                                 std::max(rows, columns)},
                                momenta.options().dtype(at::kBFloat16));
  float* means = momenta.mutable_data_ptr<float>();
  const weights::Narrow out{static_cast<uint16_t*>(made.mutable_data_ptr())};
  const muon::Momentum step{float(shrink), float(momentum), nesterov};
  torch::stable::parallel_for(0, made.size(0), 1, [&](int64_t i, int64_t end) {
    for (; i < end; ++i)
      with_numbers(gradients[i / stack], [&](auto g) {
        step(decltype(g){g.at + i % stack * size}, means + i * size, weights::Narrow{out.at + i * size}, rows,
             columns, rows > columns);
      });
  });
  return made;
}

// weight · kept - size · update for each weight; updates have the shape that `muon_directions` returns.
void split_move_(at::TensorList weights, at::TensorList low_bits, const Tensor& updates, double kept,
                 double size) {
  const int64_t rows = weights[0].size(-2), columns = weights[0].size(-1), matrix = rows * columns;
  const int64_t stack = weights[0].numel() / matrix;
  WORKHORSE_CHECK(is_narrow(updates) && updates.is_contiguous() &&
                  updates.numel() == int64_t(weights.size()) * stack * matrix,
              "workhorse: updates must be contiguous and bfloat16, one for each matrix");
  const weights::Narrow given{static_cast<uint16_t*>(const_cast<void*>(updates.const_data_ptr()))};
  torch::stable::parallel_for(0, updates.numel() / matrix, 1, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const weights::Split all = split_weights(weights[i / stack], low_bits[i / stack]);
      const int64_t at = i % stack * matrix;
      muon::move({all.upper + at, all.low_bits + at}, weights::Narrow{given.at + i * matrix}, rows, columns,
                 rows > columns, float(kept), float(size));
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workhorse, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, float scale, bool causal, Tensor? slopes) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor y, Tensor dy, Tensor lse, float scale, "
      "bool causal, Tensor? slopes) -> (Tensor, Tensor, Tensor)");
  library.def("activation(Tensor x, Tensor? up, Tensor table, str name) -> Tensor");
  library.def(
      "activation_backward(Tensor dy, Tensor x, Tensor? up, Tensor table, str name) -> Tensor[]");
  library.def(
      "score_(Tensor(a!) logits, Tensor targets, Tensor? coefficients, float multiplier, bool entropy) "
      "-> Tensor");
  library.def("sum_rows(Tensor ids, Tensor rows, int vocab) -> (Tensor, Tensor)");
  library.def("squared_length(Tensor[] tensors) -> Tensor");
  library.def(
      "norm(Tensor x, Tensor? weight, Tensor? bias, float offset, float eps, bool centred, "
      "bool rounded) -> (Tensor, Tensor)");
  library.def(
      "add_norm(Tensor x, Tensor branch, Tensor? weight, Tensor? bias, float offset, float eps, bool "
      "centred, bool rounded) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor dy, Tensor x, Tensor moments, Tensor? weight, Tensor? other, float offset, "
      "bool centred) -> (Tensor, Tensor)");
  library.def(
      "adamw_(Tensor(a!)[] weights, Tensor(b!)[] low_bits, Tensor[] gradients, Tensor(c!)[] means, "
      "Tensor(d!)[] mean_squares, Tensor(e!)[] updates, float shrink, float rate, float beta1, float beta2, "
      "float eps, float weight_decay) -> ()");
  library.def(
      "muon_directions(Tensor[] gradients, Tensor(a!) momenta, float shrink, float momentum, bool "
      "nesterov) -> Tensor");
  library.def(
      "split_move_(Tensor(a!)[] weights, Tensor(b!)[] low_bits, Tensor updates, float kept, float "
      "size) -> ()");
  library.def(
      "norm_project(Tensor x, Tensor? branch, Tensor? weight, Tensor? bias, float offset, float eps, bool "
      "centred, bool rounded, Tensor[] matrices, Tensor?[] biases) -> Tensor[]");
  library.def(
      "norm_project_backward(Tensor[] above, Tensor[] matrices, Tensor x, Tensor moments, Tensor? weight, "
      "Tensor? of_y, Tensor? other, float offset, bool centred) -> (Tensor, Tensor)");
  library.def(
      "feed(Tensor x, Tensor attended, Tensor out_matrix, Tensor? out_bias, Tensor? weight, Tensor? bias, "
      "float offset, float eps, bool centred, bool rounded, Tensor[] matrices, Tensor?[] biases, Tensor "
      "down, Tensor? down_bias, Tensor table, str name, bool normed) -> Tensor[]");
  library.def(
      "feed_backward(Tensor above, Tensor total, Tensor moments, Tensor? weight, float offset, bool "
      "centred, Tensor out_matrix, Tensor[] matrices, Tensor[] hidden, Tensor down, Tensor table, str "
      "name, bool normed) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(workhorse, CPU, library) {
  library.impl("attention", attention);
  library.impl("attention_backward", attention_backward);
  library.impl("activation", activation);
  library.impl("activation_backward", activation_backward);
  library.impl("score_", score_);
  library.impl("sum_rows", sum_rows);
  library.impl("squared_length", squared_length);
  library.impl("add_norm", add_norm);
  library.impl("norm", norm);
  library.impl("norm_backward", norm_backward);
  library.impl("adamw_", adamw_);
  library.impl("muon_directions", muon_directions);
  library.impl("split_move_", split_move_);
  library.impl("norm_project", norm_project);
  library.impl("norm_project_backward", norm_project_backward);
  library.impl("feed", feed);
  library.impl("feed_backward", feed_backward);
}

}  // namespace workhorse::bindings
