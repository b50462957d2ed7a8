// Norms, activations and the loss for PyTorch: they check, allocate, and divide work among threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/refuse.h"
#include "ops/activations.h"
#include "ops/training/logprobs.h"
#include "ops/training/norms.h"

namespace workhorse::bindings {

using at::Tensor;

constexpr int64_t kShare = 1 << 14;  // minimum elements per thread
constexpr int64_t kRows = 48;        // rows of a norm that are summed together, for any number of threads

// Call this outside of loops: threads that ask the same tensor for its pointer block each other.
template <class T>
const T* from(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* into(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls f with a value of the tensor's element type.
template <class F>
void with_type(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) return f(float{});
  WORKHORSE_CHECK(x.scalar_type() == at::kBFloat16, "workhorse: a tensor must be float32 or bfloat16");
  f(BFloat16{});
}

// `with_type` for contiguous tensors.
template <class F>
void by_type(const Tensor& x, F f) {
  WORKHORSE_CHECK(x.is_contiguous(), "workhorse: a tensor must be contiguous");
  with_type(x, f);
}

// Calls f with an activation and a value of x's element type: for bfloat16 a look-up in `table`, for float the
// activation with that name.
template <class F>
void with_activation(const Tensor& x, const Tensor& table, std::string_view name, F f) {
  if (x.scalar_type() == at::kBFloat16) {
    WORKHORSE_CHECK(table.scalar_type() == at::kInt && table.numel() == 1 << 16 && table.is_contiguous(),
                "workhorse: an activation needs a contiguous int32 table of 65536 elements");
    return f(activations::Table{from<uint32_t>(table)}, BFloat16{});
  }
  if (name == "gelu") return f(activations::Computed<activations::Gelu>{}, float{});
  if (name == "gelu_tanh") return f(activations::Computed<activations::GeluTanh>{}, float{});
  if (name == "relu") return f(activations::Computed<activations::Relu>{}, float{});
  if (name == "relu2") return f(activations::Computed<activations::ReluSquared>{}, float{});
  if (name == "sigmoid") return f(activations::Computed<activations::Sigmoid>{}, float{});
  if (name == "silu") return f(activations::Computed<activations::Silu>{}, float{});
  WORKHORSE_CHECK(false, "workhorse: unknown activation ", name);
}

inline void check_activation(const Tensor& x, const Tensor& other) {
  for (const Tensor& t : {x, other})
    WORKHORSE_CHECK((t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat) &&
                    t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.numel() == x.numel(),
                "workhorse: an activation needs contiguous tensors of one size and type");
}

// act(x), or act(x) · up.
inline Tensor activation(const Tensor& x, const std::optional<Tensor>& up, const Tensor& table,
                         std::string_view name) {
  check_activation(x, up.value_or(x));
  const Tensor y = at::empty_like(x);
  with_activation(x, table, name, [&]<class T>(auto act, T) {
    const T *in = from<T>(x), *other = from<T>(up.value_or(x));
    T* out = into<T>(y);
    torch::stable::parallel_for(0, x.numel(), kShare, [&](int64_t i, int64_t end) {
      if (up) activations::forward<true>(end - i, act, in + i, other + i, out + i);
      else activations::forward<false>(end - i, act, in + i, other + i, out + i);
    });
  });
  return y;
}

// The activation, recomputed, and the gradients of x and, if given, up.
inline std::vector<Tensor> activation_backward(const Tensor& dy, const Tensor& x,
                                               const std::optional<Tensor>& up, const Tensor& table,
                                               std::string_view name) {
  check_activation(x, up.value_or(x));
  check_activation(x, dy);
  std::vector<Tensor> made;
  for (int i = 0; i < (up ? 3 : 2); i++) made.push_back(at::empty_like(x));
  with_activation(x, table, name, [&]<class T>(auto act, T) {
    const T *above = from<T>(dy), *in = from<T>(x), *other = from<T>(up.value_or(x));
    T *y = into<T>(made[0]), *dx = into<T>(made[1]), *dup = into<T>(made.back());
    torch::stable::parallel_for(0, x.numel(), kShare, [&](int64_t i, int64_t end) {
      const auto run = [&](auto gated) {
        activations::backward<decltype(gated)::value>(end - i, act, above + i, in + i, other + i,
                                                      y + i, dx + i, dup + i);
      };
      if (up) run(std::true_type{});
      else run(std::false_type{});
    });
  });
  return made;
}

// The weight or bias of a norm in float32; filled with `otherwise` if the norm has none.
inline std::vector<float> in_float32(const std::optional<Tensor>& weight, int64_t width, double otherwise) {
  if (!weight) return std::vector<float>(width, float(otherwise));
  WORKHORSE_CHECK(weight->numel() == width,
              "workhorse: a norm's weight and bias must be as wide as its input");
  const Tensor wide = weight->to(at::kFloat).contiguous();
  return {from<float>(wide), from<float>(wide) + width};
}

inline void check_like(const Tensor& x, const std::optional<Tensor>& other) {
  WORKHORSE_CHECK(!other || (other->is_contiguous() && other->scalar_type() == x.scalar_type() &&
                         other->sizes() == x.sizes()),
              "workhorse: the tensors of a norm must be contiguous, of one type and shape");
}

// The weight of a norm plus its offset, in float32.
inline std::vector<float> gain_of(const Tensor& x, const std::optional<Tensor>& weight, double offset) {
  std::vector<float> gain = in_float32(weight, x.size(-1), 1);
  for (float& value : gain) value += weight ? float(offset) : 0;
  return gain;
}

struct NormOptions {
  double offset, eps;
  bool centred;  // LayerNorm; otherwise RMSNorm
  bool rounded;  // rounds before the multiplication by the weight
};

// Computes the norm of x over its last axis, and owns the result and the mean and scale of each row.
struct Norm {
  Tensor y, moments;

  Norm(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
       const NormOptions& options)
      : y(at::empty_like(x)),
        moments(at::empty({x.numel() / x.size(-1), 2}, x.options().dtype(at::kFloat))),
        gain_(gain_of(x, weight, options.offset)),
        shift_(in_float32(bias, x.size(-1), 0)),
        options_(options) {
    WORKHORSE_CHECK(!(options.centred && options.rounded),
                "workhorse: a centred norm cannot be rounded before the multiplication by its weight");
    WORKHORSE_CHECK(x.is_contiguous(), "workhorse: a tensor must be contiguous");
  }

// Returns a function that computes a range of rows.
  template <class T>
  auto rows(const Tensor& x) const {
    const auto run = options_.centred   ? norms::forward<true, false, T>
                     : options_.rounded ? norms::forward<false, true, T>
                                        : norms::forward<false, false, T>;
    const T* in = from<T>(x);
    T* out = into<T>(y);
    Moments* found = into<Moments>(moments);
    return [=, this, width = x.size(-1)](int64_t i, int64_t end) {
      for (; i < end; i++)
        found[i] = run(width, in + i * width, gain_.data(), shift_.data(), float(options_.eps), out + i * width);
    };
  }

 private:
  std::vector<float> gain_, shift_;
  NormOptions options_;
};

// x, or x + branch if given; its norm; and the mean and scale of each row.
inline std::tuple<Tensor, Tensor, Tensor> norm_of_sum(const Tensor& x,
                                                      const std::optional<Tensor>& branch,
                                                      const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const NormOptions& options) {
  check_like(x, branch);
  const Norm norm(x, weight, bias, options);
  const Tensor sum = branch ? at::empty_like(x) : x;
  with_type(x, [&]<class T>(T) {
    const T *in = from<T>(x), *other = branch ? from<T>(*branch) : nullptr;
    T* added = branch ? into<T>(sum) : nullptr;
    const auto normalise = norm.rows<T>(sum);
    const int64_t width = x.size(-1);
    torch::stable::parallel_for(0, x.numel() / width, kShare / width + 1, [&](int64_t i, int64_t end) {
      for (; i < end; i++) {
        const int64_t row = i * width;
        if (branch) norms::add_row(width, in + row, other + row, added + row);
        normalise(i, i + 1);
      }
    });
  });
  return {sum, norm.y, norm.moments};
}

inline std::tuple<Tensor, Tensor> norm(const Tensor& x, const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& bias, double offset, double eps,
                                       bool centred, bool rounded) {
  const auto [sum, y, moments] = norm_of_sum(x, {}, weight, bias, {offset, eps, centred, rounded});
  return {y, moments};
}

inline std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& branch,
                                                   const std::optional<Tensor>& weight,
                                                   const std::optional<Tensor>& bias, double offset,
                                                   double eps, bool centred, bool rounded) {
  return norm_of_sum(x, branch, weight, bias, {offset, eps, centred, rounded});
}

// Computes the gradient of each row of x, plus `other` if given. Owns the gradients of weight and bias in float32,
// (parts, 2, width); each part is the sum over kRows rows.
struct NormBackward {
  Tensor sums;

  NormBackward(const Tensor& dy, const Tensor& x, const Tensor& moments, const std::optional<Tensor>& weight,
               const std::optional<Tensor>& other, double offset, bool centred)
      : sums(at::zeros({(x.numel() / x.size(-1) + kRows - 1) / kRows, 2, x.size(-1)},
                       x.options().dtype(at::kFloat))),
        dy_(dy),
        x_(x),
        moments_(moments),
        other_(other),
        gain_(gain_of(x, weight, offset)),
        centred_(centred) {
    WORKHORSE_CHECK(x.is_contiguous(), "workhorse: a tensor must be contiguous");
    check_like(x, dy);
    check_like(x, other);
  }

// Returns a function that computes a range of rows, which begins with a part. dx may be dy.
  template <class T>
  auto rows(const Tensor& dx) const {
    const auto run = centred_ ? norms::backward<true, T> : norms::backward<false, T>;
    const T *above = from<T>(dy_), *in = from<T>(x_), *added = other_ ? from<T>(*other_) : nullptr;
    const Moments* found = from<Moments>(moments_);
    T* out = into<T>(dx);
    float* sum = into<float>(sums);
    return [=, this, width = x_.size(-1)](int64_t i, int64_t end) {
      for (; i < end; i++) {
        const int64_t row = i * width, part = i / kRows;
        run(width, above + row, in + row, gain_.data(), found[i], out + row, sum + 2 * part * width,
            sum + (2 * part + 1) * width);
        if (added) norms::add_row(width, out + row, added + row, out + row);
      }
    };
  }

 private:
  Tensor dy_, x_, moments_;
  std::optional<Tensor> other_;
  std::vector<float> gain_;
  bool centred_;
};

// Calls f(first row, end row) for each thread's rows. The ranges do not divide rows that norms sum together.
template <class F>
void in_rows(int64_t rows, F f) {
  torch::stable::parallel_for(0, (rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    f(begin * kRows, std::min(rows, end * kRows));
  });
}

// The gradient of x, plus `other` if given; and the gradients of weight and bias in float32, as the rows of
// (2, width).
inline std::tuple<Tensor, Tensor> norm_backward(const Tensor& dy, const Tensor& x,
                                                const Tensor& moments,
                                                const std::optional<Tensor>& weight,
                                                const std::optional<Tensor>& other, double offset,
                                                bool centred) {
  const NormBackward norm(dy, x, moments, weight, other, offset, centred);
  const Tensor dx = at::empty_like(x);
  with_type(x, [&]<class T>(T) { in_rows(x.numel() / x.size(-1), norm.rows<T>(dx)); });
  return {dx, norm.sums.sum(0)};
}

constexpr int64_t kIgnored = -100;  // as PyTorch's losses have it

// The terms of logits (tokens, vocab) as rows of (tokens, 3): the log-probability of each target, the log of the
// sum of exponentials, and the entropy if requested. With coefficients (tokens, 4), the logits are
// overwritten with the gradient. Rows with the target kIgnored have terms and gradients of 0.
inline Tensor score_(Tensor& logits, const Tensor& targets, const std::optional<Tensor>& coefficients,
                     double multiplier, bool entropy) {
  const int64_t tokens = logits.size(0), vocab = logits.size(1);
  WORKHORSE_CHECK(logits.is_contiguous() && targets.is_contiguous() && targets.numel() == tokens &&
                  targets.scalar_type() == at::kLong,
              "workhorse: log-probabilities need contiguous logits and, for each row, a contiguous int64 target");
  WORKHORSE_CHECK(!coefficients || (coefficients->is_contiguous() && coefficients->numel() == 4 * tokens &&
                                    coefficients->scalar_type() == at::kFloat),
              "workhorse: log-probabilities need four contiguous float32 coefficients for each row");
  const int64_t* wanted = from<int64_t>(targets);
  for (int64_t i = 0; i < tokens; i++)
    WORKHORSE_CHECK(wanted[i] == kIgnored || (0 <= wanted[i] && wanted[i] < vocab), "workhorse: target ", wanted[i],
                " is out of range for ", vocab, " logits");
  const Tensor found = at::zeros({tokens, 3}, logits.options().dtype(at::kFloat));
  auto* terms = reinterpret_cast<logprobs::Terms*>(into<float>(found));
  const auto* by = coefficients ? reinterpret_cast<const logprobs::Coefficients*>(from<float>(*coefficients)) : nullptr;
  by_type(logits, [&]<class T>(T) {
    T* rows = into<T>(logits);
    const auto score = entropy ? logprobs::score<true, T> : logprobs::score<false, T>;
    torch::stable::parallel_for(0, tokens, kShare / vocab + 1, [&](int64_t i, int64_t end) {
      for (; i < end; i++) {
        T* row = rows + i * vocab;
        if (wanted[i] != kIgnored) terms[i] = score(vocab, row, wanted[i], float(multiplier), by ? by + i : nullptr);
        else if (by) std::fill(row, row + vocab, T{});
      }
    });
  });
  return found;
}

// The distinct ids in ascending order, and the sums of their rows, added sequentially in float32.
inline std::tuple<Tensor, Tensor> sum_rows(const Tensor& ids, const Tensor& rows, int64_t vocab) {
  const int64_t n = ids.numel(), width = rows.size(1);
  WORKHORSE_CHECK(ids.is_contiguous() && ids.scalar_type() == at::kLong && rows.size(0) == n,
              "workhorse: a sum of rows needs a contiguous int64 id for each");
  const int64_t* id = from<int64_t>(ids);
  std::vector<int64_t> first(vocab, -1), next(n);  // a list of the rows of each id
  for (int64_t i = n - 1; i >= 0; i--) {
    WORKHORSE_CHECK(id[i] >= 0 && id[i] < vocab, "workhorse: id ", id[i], " is out of range for ", vocab, " rows");
    next[i] = std::exchange(first[id[i]], i);
  }
  const int64_t count = vocab - std::count(first.begin(), first.end(), -1);
  const Tensor used = at::empty({count}, ids.options()), sums = at::empty({count, width}, rows.options());
  int64_t* const found = into<int64_t>(used);
  for (int64_t one = 0, i = 0; one < vocab; one++)
    if (first[one] >= 0) found[i++] = one;
  by_type(rows, [&]<class T>(T) {
    const T* in = from<T>(rows);
    T* out = into<T>(sums);
    torch::stable::parallel_for(0, count, kShare / width + 1, [&](int64_t i, int64_t end) {
      std::vector<float> total(width);
      for (; i < end; i++) {
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t row = first[found[i]]; row >= 0; row = next[row])
          each(width, [&]<class V>(V, int64_t j) {
            write(total.data() + j, read<V>(total.data() + j) + read<V>(in + row * width + j));
          });
        each(width, [&]<class V>(V, int64_t j) { write(out + i * width + j, read<V>(total.data() + j)); });
      }
    });
  });
  return {used, sums};
}

// The squared norm of all tensors as one vector; each tensor may be float32 or bfloat16.
inline Tensor squared_length(const std::vector<Tensor>& tensors) {
  struct Part {
    const Tensor* of;
    int64_t start;
  };
  std::vector<Part> parts;  // each is summed by one thread, so the bits do not depend on their number
  for (const Tensor& x : tensors)
    for (int64_t start = 0; start < x.numel(); start += kShare) parts.push_back({&x, start});
  const Tensor sums = at::empty({int64_t(parts.size())}, at::kFloat);
  float* sum = into<float>(sums);
  torch::stable::parallel_for(0, parts.size(), 1, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const auto [x, start] = parts[i];
      by_type(*x, [&]<class T>(T) {
        Sum squares;
        const T* at = from<T>(*x) + start;
        each(std::min(kShare, x->numel() - start), [&]<class V>(V, int64_t j) {
          const V value = read<V>(at + j);
          squares.add_product(value, value);
        });
        sum[i] = squares;
      });
    }
  });
  return sums.sum();
}

}  // namespace workhorse::bindings
