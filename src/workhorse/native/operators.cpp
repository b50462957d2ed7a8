// The operators as PyTorch sees them: shapes and types checked, memory made, work split over threads.
//
// Written against PyTorch's stable interface, so that it compiles in seconds and runs its loops on the
// threads PyTorch has already started.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <functional>
#include <numeric>
#include <optional>
#include <vector>

#include "attend.h"
#include "packed.h"
#include "rows.h"
#include "tiles.h"

namespace workhorse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kThreadBytes = 1 << 15;  // less to read than this is not worth waking a thread for
constexpr int64_t kPass = 256;  // rows of x, put in order, that stay in the second cache

template <class F>
void in_threads(int64_t count, int64_t bytes_each, const F& work) {
  const int64_t grain = std::max<int64_t>(1, kThreadBytes / std::max<int64_t>(1, bytes_each));
  torch::stable::parallel_for(0, count, grain, work);
}

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

void check(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape,
           const char* name) {
  bool same = tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
              tensor.dim() == int64_t(shape.size());
  int64_t axis = 0;
  for (int64_t size : shape) same = same && tensor.size(axis++) == size;
  STD_TORCH_CHECK(same, "workhorse: ", name, " has another type, shape or device than expected");
}

// x without its leading axes, and room for y.
struct Rows {
  Tensor x, y;
  int64_t rows, in;

  Rows(const Tensor& given, int64_t out)
      : x(given.is_contiguous() ? given : torch::stable::contiguous(given)) {
    STD_TORCH_CHECK(x.is_cpu() && x.dim() > 0, "workhorse: x must have an axis, on the CPU");
    auto sizes = x.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    in = shape.back();
    shape.back() = out;
    rows = std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies<>());
    y = torch::stable::new_empty(x, shape);
  }
};

template <class T>
void multiply(const Rows& given, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t out = weight.size(0), in = given.in, rows = given.rows;
  const T *x = data<T>(given.x), *w = data<T>(weight), *b = data<T>(bias);
  T* y = static_cast<T*>(given.y.mutable_data_ptr());
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, BFloat16>)
    if (rows > 1 && tiles_allowed()) {
      TiledLinear tiled{x, b, y, rows, in, out};
      in_threads(tiled.columns, in * kTile * 2,
                 [&](int64_t from, int64_t to) { tiled.pack(from, to); });
      in_threads((out + kTile - 1) / kTile, in * kTile * 2, [&](int64_t from, int64_t to) {
        const Tiles tiles;
        for (int64_t o = from * kTile; o < std::min(to * kTile, out); o += kTile)
          tiled.block(o, w + o * in, true);
      });
      return;
    }
#endif
  const Linear<T> linear{x, w, b, y, rows, in, out};
  in_threads((out + kOut - 1) / kOut, in * kOut * sizeof(T), [&](int64_t from, int64_t to) {
    linear.run(from * kOut, std::min(to * kOut, out));
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(weight.dim() == 2, "workhorse: weight must have two axes");
  const ScalarType type = x.scalar_type();
  const Rows given(x, weight.size(0));
  check(weight, type, {weight.size(0), given.in}, "weight");
  if (bias) check(*bias, type, {weight.size(0)}, "bias");
  if (type == ScalarType::BFloat16)
    multiply<BFloat16>(given, weight, bias);
  else if (type == ScalarType::Float)
    multiply<float>(given, weight, bias);
  else
    STD_TORCH_CHECK(false, "workhorse: x must be bfloat16 or float32");
  return given.y;
}

template <class T>
Heads<T> heads_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.stride(3) == 1,
                  "workhorse: q, k and v must be on the CPU, their last axis side by side");
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

template <class T>
void attend_to(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
               double scale, const Tensor& y) {
  const int64_t kv_heads = k.size(1), slots = k.size(2), width = q.size(3), value_width = v.size(3);
  const int64_t mask_stride = mask && mask->size(0) > 1 ? mask->stride(0) : 0;
  const Attend<T> attend{heads_of<T>(q), heads_of<T>(k), heads_of<T>(v), data<bool>(mask),
                         mask_stride,    static_cast<T*>(y.mutable_data_ptr()),
                         q.size(1),      kv_heads,       slots, width, value_width, float(scale)};
  in_threads(q.size(0) * kv_heads, slots * (width + value_width) * sizeof(T),
             [&](int64_t from, int64_t to) { attend.run(from, to); });
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
              double scale) {
  const ScalarType type = q.scalar_type();
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(2) == 1 &&
                      k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(3) == q.size(3) &&
                      v.size(1) == k.size(1) && v.size(2) == k.size(2) && k.size(1) * k.size(2) > 0 &&
                      q.size(1) % k.size(1) == 0 && k.scalar_type() == type &&
                      v.scalar_type() == type,
                  "workhorse: q, k and v do not belong together");
  if (mask)
    STD_TORCH_CHECK(mask->is_cpu() && mask->scalar_type() == ScalarType::Bool && mask->dim() == 4 &&
                        (mask->size(0) == 1 || mask->size(0) == q.size(0)) && mask->size(1) == 1 &&
                        mask->size(2) == 1 && mask->size(3) == k.size(2) && mask->stride(3) == 1,
                    "workhorse: mask must be bool, (batch or 1, 1, 1, slots)");
  Tensor y = torch::stable::new_empty(q, {q.size(0), q.size(1), 1, v.size(3)});
  if (type == ScalarType::BFloat16)
    attend_to<BFloat16>(q, k, v, mask, scale, y);
  else if (type == ScalarType::Float)
    attend_to<float>(q, k, v, mask, scale, y);
  else
    STD_TORCH_CHECK(false, "workhorse: q must be bfloat16 or float32");
  return y;
}

#ifdef WORKHORSE_PACKS
template <int Bits>
void multiply(const Rows& given, const PackedWeight<Bits>& weight, const BFloat16* bias,
              int64_t out) {
  const BFloat16* x = data<BFloat16>(given.x);
  BFloat16* y = static_cast<BFloat16*>(given.y.mutable_data_ptr());
  const int64_t blocks = (out + kLanes - 1) / kLanes, bytes = weight.groups * weight.bytes;
#ifdef __AMX_BF16__
  if (given.rows >= kManyRows && tiles_allowed()) {
    for (int64_t r = 0; r < given.rows; r += kPass) {
      TiledLinear tiled{x + r * given.in, bias, y + r * out, std::min(kPass, given.rows - r),
                        given.in, out};
      in_threads(tiled.columns, given.in * kTile * 2,
                 [&](int64_t from, int64_t to) { tiled.pack(from, to); });
      in_threads(blocks, bytes, [&](int64_t from, int64_t to) {
        const Tiles tiles;
        const std::unique_ptr<BFloat16[]> scratch(new BFloat16[kLanes * given.in]);
        for (int64_t block = from; block < to; block++) {
          weight.expand(block, scratch.get());
          written();
          tiled.block(block * kLanes, scratch.get(), false);
        }
      });
    }
    return;
  }
#endif
  const PackedLinear<Bits> packed(weight, x, bias, y, given.rows, out);
  in_threads(blocks, bytes, [&](int64_t from, int64_t to) { packed.run(from, to); });
}

Tensor packed_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                     const std::optional<Tensor>& levels, const std::optional<Tensor>& bias,
                     int64_t out) {
  STD_TORCH_CHECK(codes.dim() == 3, "workhorse: codes must have three axes");
  const Rows given(x, out);
  const int64_t blocks = (out + kLanes - 1) / kLanes, groups = codes.size(1);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 && given.in == groups * kGroup,
                  "workhorse: x must be bfloat16 and as wide as the groups of codes");
  check(codes, ScalarType::Byte,
        {blocks, groups, levels ? PackedWeight<4>::bytes : PackedWeight<8>::bytes}, "codes");
  check(scales, ScalarType::Short, {blocks, groups, kLanes}, "scales");
  if (levels) check(*levels, ScalarType::Byte, {kLanes}, "levels");
  if (bias) check(*bias, ScalarType::BFloat16, {out}, "bias");
  const uint8_t *code = data<uint8_t>(codes), *level = data<uint8_t>(levels);
  const BFloat16 *scale = data<BFloat16>(scales), *b = data<BFloat16>(bias);
  if (levels)
    multiply(given, PackedWeight<4>{code, scale, level, groups}, b, out);
  else
    multiply(given, PackedWeight<8>{code, scale, level, groups}, b, out);
  return given.y;
}
#endif

}  // namespace
}  // namespace workhorse

STABLE_TORCH_LIBRARY(workhorse, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor");
#ifdef WORKHORSE_PACKS
  m.def(
      "packed_linear(Tensor x, Tensor codes, Tensor scales, Tensor? levels, Tensor? bias, int out) "
      "-> Tensor");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  m.impl("linear", TORCH_BOX(&workhorse::linear));
  m.impl("attend", TORCH_BOX(&workhorse::attend));
#ifdef WORKHORSE_PACKS
  m.impl("packed_linear", TORCH_BOX(&workhorse::packed_linear));
#endif
}
