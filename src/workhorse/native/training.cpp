// What a training step on a CPU with AMX lacks in PyTorch: the backward pass of bfloat16 attention in
// matrix instructions, and AdamW in one pass over weights that are split in two (train/masters.py).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/stable/ops.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

namespace workhorse {
namespace {

using at::BFloat16;
using at::Tensor;
using at::native::cpublas::brgemm;

constexpr int64_t kKeys = 64;      // of a head that are worked on at once
constexpr int64_t kQueries = 512;  // likewise; both squares of scores stay in the second cache

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

// The upper half, rounded to nearest, ties to even; x is finite.
uint16_t rounded(float x) { return uint16_t((bits(x) + 0x7fff + ((bits(x) >> 16) & 1)) >> 16); }

float widened(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// e^x for x <= 0, to about 2e-7: 2^n · p(r) with n = round(x / ln 2). A plain loop over it vectorises.
float power(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = __builtin_rintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((int32_t(n) + 127) << 23);
}

// One head's matrix (seq, width) in the memory of a larger tensor: elements of a row lie side by side.
struct Head {
  const uint16_t* at;
  int64_t stride;

  Head(const Tensor& t, int64_t batch, int64_t head)
      : at(static_cast<const uint16_t*>(t.const_data_ptr()) + batch * t.stride(0) +
           head * t.stride(1)),
        stride(t.stride(2)) {}

  uint32_t pair(int64_t row, int64_t column) const {
    uint32_t both;
    std::memcpy(&both, at + row * stride + column, sizeof both);
    return both;
  }
};

// The right side of a matrix instruction: rows 2i and 2i+1 interleaved into 32-bit words.
void interleave(const Head& x, int64_t seq, int64_t width, uint32_t* to) {
  for (int64_t i = 0; i < seq / 2; ++i)
    for (int64_t j = 0; j < width; ++j)
      to[i * width + j] = x.at[2 * i * x.stride + j] |
                          uint32_t(x.at[(2 * i + 1) * x.stride + j]) << 16;
}

// The same of the transposed matrix.
void interleave_transposed(const Head& x, int64_t seq, int64_t width, uint32_t* to) {
  for (int64_t i = 0; i < width / 2; ++i)
    for (int64_t j = 0; j < seq; ++j) to[i * seq + j] = x.pair(j, 2 * i);
}

void transpose(const Head& x, int64_t seq, int64_t width, uint16_t* to) {
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < seq; ++i) to[j * seq + i] = x.at[i * x.stride + j];
}

const BFloat16* as_bfloat16(const void* at) { return static_cast<const BFloat16*>(at); }

// What a thread needs, made once for all its heads.
struct Scratch {
  std::vector<uint32_t> q, q_t, dy, dy_t, square;
  std::vector<uint16_t> k_t, weights, slopes;
  std::vector<float> scores, gradients, delta, dq_t, dk, dv;

  Scratch(int64_t seq, int64_t width)
      : q(seq * width / 2), q_t(seq * width / 2), dy(seq * width / 2), dy_t(seq * width / 2),
        square(kKeys * kQueries / 2), k_t(seq * width), weights(kKeys * kQueries),
        slopes(kKeys * kQueries), scores(kKeys * kQueries), gradients(kKeys * kQueries),
        delta(seq), dq_t(seq * width), dk(kKeys * width), dv(kKeys * width) {}
};

// One head of attention backwards (FlashAttention-2, 2307.08691 §3.1), everything transposed: keys are
// rows and queries columns, so that no square of scores needs turning.
//   Pᵀ = exp(K Qᵀ · scale - lse),  dPᵀ = V dYᵀ,  Sᵀ = Pᵀ (dPᵀ - Σ y dy) · scale
//   dV = Pᵀ dY,  dK = Sᵀ Q,  dQᵀ = Kᵀ Sᵀ
void head_backward(const Head& q, const Head& k, const Head& v, const Head& y, const Head& dy,
                   const float* lse, int64_t seq, int64_t width, float scale, bool causal,
                   Scratch& s, uint16_t* dq, uint16_t* dk, uint16_t* dv, int64_t out_stride) {
  interleave(q, seq, width, s.q.data());
  interleave_transposed(q, seq, width, s.q_t.data());
  interleave(dy, seq, width, s.dy.data());
  interleave_transposed(dy, seq, width, s.dy_t.data());
  transpose(k, seq, width, s.k_t.data());
  for (int64_t i = 0; i < seq; ++i) {
    float sum = 0;
    for (int64_t j = 0; j < width; ++j)
      sum += widened(y.at[i * y.stride + j]) * widened(dy.at[i * dy.stride + j]);
    s.delta[i] = sum;
  }
  std::fill(s.dq_t.begin(), s.dq_t.end(), 0.0f);
  for (int64_t key = 0; key < seq; key += kKeys) {
    const int64_t keys = std::min(kKeys, seq - key);
    bool more = false;
    for (int64_t first = causal ? key : 0; first < seq; first += kQueries, more = true) {
      const int64_t n = std::min(kQueries, seq - first);
      brgemm(keys, n, width, k.stride, seq, n, false, as_bfloat16(k.at + key * k.stride),
             as_bfloat16(s.q_t.data() + first), s.scores.data());
      brgemm(keys, n, width, v.stride, seq, n, false, as_bfloat16(v.at + key * v.stride),
             as_bfloat16(s.dy_t.data() + first), s.gradients.data());
      for (int64_t i = 0; i < keys; ++i) {
        float* score = s.scores.data() + i * n;
        const float* gradient = s.gradients.data() + i * n;
        uint16_t* weight = s.weights.data() + i * n;
        uint16_t* slope = s.slopes.data() + i * n;
        // Queries before a key do not see it.
        const int64_t hidden = causal ? std::clamp(key + i - first, int64_t(0), n) : 0;
        std::fill(weight, weight + hidden, 0);
        std::fill(slope, slope + hidden, 0);
        for (int64_t j = hidden; j < n; ++j) {
          const float exponent = score[j] * scale - lse[first + j];
          const float p = power(exponent < 0 ? exponent : 0.0f);
          weight[j] = rounded(p);
          slope[j] = rounded(p * (gradient[j] - s.delta[first + j]) * scale);
        }
      }
      for (int64_t i = 0; i < keys / 2; ++i)
        for (int64_t j = 0; j < n; ++j)
          s.square[i * n + j] = s.slopes[2 * i * n + j] | uint32_t(s.slopes[(2 * i + 1) * n + j]) << 16;
      brgemm(keys, width, n, n, width, width, more, as_bfloat16(s.weights.data()),
             as_bfloat16(s.dy.data() + first / 2 * width), s.dv.data());
      brgemm(keys, width, n, n, width, width, more, as_bfloat16(s.slopes.data()),
             as_bfloat16(s.q.data() + first / 2 * width), s.dk.data());
      brgemm(width, n, keys, seq, n, seq, true, as_bfloat16(s.k_t.data() + key),
             as_bfloat16(s.square.data()), s.dq_t.data() + first);
    }
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < width; ++j) {
        dk[(key + i) * out_stride + j] = rounded(s.dk[i * width + j]);
        dv[(key + i) * out_stride + j] = rounded(s.dv[i * width + j]);
      }
  }
  for (int64_t i = 0; i < seq; ++i)
    for (int64_t j = 0; j < width; ++j) dq[i * out_stride + j] = rounded(s.dq_t[j * seq + i]);
}

// Gradients of q, k and v, each (batch, heads, seq, width) in the memory order (batch, seq, heads,
// width) of the projections before them.
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& y,
                                                      const Tensor& dy, const Tensor& lse,
                                                      double scale, bool causal) {
  for (const Tensor& x : {q, k, v, y, dy})
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.stride(3) == 1 && x.sizes() == q.sizes(),
                "workhorse: attention_backward wants bfloat16 tensors of one shape");
  const int64_t heads = q.size(1), seq = q.size(2), width = q.size(3);
  TORCH_CHECK(seq % 2 == 0 && width % 2 == 0, "workhorse: length and width must be even");
  const Tensor rows = lse.contiguous();  // (batch, heads, seq)
  const auto make = [&] {
    return at::empty({q.size(0), seq, heads, width}, q.options()).transpose(1, 2);
  };
  const Tensor dq = make();
  const Tensor dk = make();
  const Tensor dv = make();
  const auto out = [&](const Tensor& t, int64_t b, int64_t h) {
    return static_cast<uint16_t*>(t.mutable_data_ptr()) + b * t.stride(0) + h * t.stride(1);
  };
  torch::stable::parallel_for(0, q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(seq, width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / heads, h = i % heads;
      head_backward({q, b, h}, {k, b, h}, {v, b, h}, {y, b, h}, {dy, b, h},
                    rows.const_data_ptr<float>() + i * seq, seq, width, float(scale), causal, scratch,
                    out(dq, b, h), out(dk, b, h), out(dv, b, h), heads * width);
    }
    at::native::cpublas::brgemm_release();
  });
  return {dq, dk, dv};
}

// AdamW (1711.05101) on float32 values that are a bfloat16 and an int16 remainder, in place.
struct SplitAdamW {
  uint16_t* upper;
  int16_t* lower;
  float *mean, *mean_square;
  float shrink, kept, first, second, step, root, eps;

  template <class Gradient>
  void operator()(const Gradient& gradient, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradient(i) * shrink;
      const float m = mean[i] + first * (g - mean[i]);
      const float s = mean_square[i] + second * (g * g - mean_square[i]);
      const float old = std::bit_cast<float>((uint32_t(upper[i]) << 16) + uint32_t(lower[i]));
      const uint32_t now = bits(old * kept - step * m / (std::sqrt(s) * root + eps));
      const uint32_t high = (now + 0x8000) >> 16;
      mean[i] = m;
      mean_square[i] = s;
      upper[i] = uint16_t(high);
      lower[i] = int16_t(now - (high << 16));
    }
  }
};

void split_adamw_(Tensor& weight, Tensor& remainder, const Tensor& gradient, Tensor& mean,
                  Tensor& mean_square, double shrink, double rate, double beta1, double beta2,
                  double eps, double weight_decay, int64_t updates) {
  const bool narrow = gradient.scalar_type() == at::kBFloat16;
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && remainder.scalar_type() == at::kShort &&
                  (narrow || gradient.scalar_type() == at::kFloat) &&
                  mean.scalar_type() == at::kFloat && mean_square.scalar_type() == at::kFloat,
              "workhorse: split_adamw_ wants other types");
  for (const Tensor& x : {weight, remainder, gradient, mean, mean_square})
    TORCH_CHECK(x.is_contiguous() && x.numel() == weight.numel(),
                "workhorse: split_adamw_ wants contiguous tensors of one size");
  const SplitAdamW update{static_cast<uint16_t*>(weight.mutable_data_ptr()),
                          static_cast<int16_t*>(remainder.mutable_data_ptr()),
                          mean.mutable_data_ptr<float>(),
                          mean_square.mutable_data_ptr<float>(),
                          float(shrink),
                          float(1 - rate * weight_decay),
                          float(1 - beta1),
                          float(1 - beta2),
                          float(rate / (1 - std::pow(beta1, updates))),
                          float(1 / std::sqrt(1 - std::pow(beta2, updates))),
                          float(eps)};
  const void* given = gradient.const_data_ptr();
  torch::stable::parallel_for(0, weight.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    if (narrow)
      update([at = static_cast<const uint16_t*>(given)](int64_t i) { return widened(at[i]); }, begin,
             end);
    else
      update([at = static_cast<const float*>(given)](int64_t i) { return at[i]; }, begin, end);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workhorse, library) {
  library.def(
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor y, Tensor dy, Tensor lse, float scale, "
      "bool causal) -> (Tensor, Tensor, Tensor)");
  library.def(
      "split_adamw_(Tensor(a!) weight, Tensor(b!) remainder, Tensor gradient, Tensor(c!) mean, "
      "Tensor(d!) mean_square, float shrink, float rate, float beta1, float beta2, float eps, float "
      "weight_decay, int updates) -> ()");
}

TORCH_LIBRARY_IMPL(workhorse, CPU, library) {
  library.impl("attention_backward", attention_backward);
  library.impl("split_adamw_", split_adamw_);
}

}  // namespace workhorse
