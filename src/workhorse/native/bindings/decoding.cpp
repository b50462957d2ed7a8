// Decoding operators for PyTorch: they check shapes and dtypes, allocate, and divide work among threads.
//
// They use PyTorch's stable interface, so they compile in seconds. Their loops run on the threads that PyTorch has
// already started.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <functional>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings/refuse.h"
#include "ops/decoding/argmax.h"
#include "ops/decoding/attend.h"
#include "ops/decoding/linear.h"
#include "ops/decoding/linear_tiles.h"
#include "ops/decoding/packed_linear_tiles.h"

namespace workhorse::bindings {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kThreadBytes = 1 << 15;  // minimum bytes to read per thread; for fewer, waking it costs more
constexpr int64_t kPassBytes = 3 << 19;  // bytes of x that stay in the L2 cache

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
  WORKHORSE_CHECK(same, "workhorse: ", name,
                  " is not a contiguous CPU tensor of the expected type and shape");
}

// x as a matrix: its leading axes are flattened to rows.
struct Given {
  Tensor x;
  int64_t rows, in;

  explicit Given(const Tensor& given)
      : x(given.is_contiguous() ? given : torch::stable::contiguous(given)) {
    WORKHORSE_CHECK(x.is_cpu() && x.dim() > 0, "workhorse: x must be on the CPU and have an axis");
    auto sizes = x.sizes();
    in = sizes.back();
    rows = std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies<>());
  }

  Tensor room(int64_t out) const {
    auto sizes = x.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    shape.back() = out;
    return torch::stable::new_empty(x, shape);
  }
};

// Divides the outputs of all layers among the threads as if they were one layer, in blocks of `size`.
template <class T, class F>
void in_blocks(const std::vector<linear::Layer<T>>& layers, int64_t size, int64_t bytes_each,
               const F& work) {
  auto blocks = [size](const linear::Layer<T>& layer) { return (layer.out + size - 1) / size; };
  int64_t total = 0;
  for (const linear::Layer<T>& layer : layers) total += blocks(layer);
  in_threads(total, bytes_each, [&](int64_t from, int64_t to) {
    for (const linear::Layer<T>& layer : layers) {
      const int64_t count = blocks(layer);
      if (from < count && to > 0)
        work(layer, std::max<int64_t>(from, 0) * size, std::min(to * size, layer.out));
      from -= count;
      to -= count;
    }
  });
}

template <class T>
void multiply(const Given& given, const std::vector<linear::Layer<T>>& layers) {
  const int64_t in = given.in, rows = given.rows;
  const T* x = data<T>(given.x);
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, BFloat16>)
    if (rows > 1 && tiles_allowed()) {
      linear::TiledRows tiled{x, rows, in};
      const std::unique_ptr<uint32_t[]> packed{new uint32_t[tiled.room()]};
      tiled.b = packed.get();
      in_threads(tiled.columns, in * kTile * 2,
                 [&](int64_t from, int64_t to) { tiled.pack(from, to); });
      in_blocks(layers, kTile, in * kTile * 2,
                [&](const linear::Layer<T>& layer, int64_t begin, int64_t end) {
                  const Tiles tiles;
                  tiled.run(layer, begin, end);
                });
      return;
    }
#endif
  const linear::Rows<T> all{x, rows, in};
  in_blocks(layers, linear::kTogether, in * linear::kTogether * sizeof(T),
            [&](const linear::Layer<T>& layer, int64_t begin, int64_t end) { all.run(layer, begin, end); });
}

template <class T>
void multiply(const Given& given, const std::vector<Tensor>& weights,
              const std::vector<std::optional<Tensor>>& biases, const std::vector<Tensor>& ys) {
  std::vector<linear::Layer<T>> layers;
  for (size_t n = 0; n < weights.size(); n++)
    layers.push_back({data<T>(weights[n]), data<T>(biases[n]),
                      static_cast<T*>(ys[n].mutable_data_ptr()), weights[n].size(0)});
  multiply(given, layers);
}

std::vector<Tensor> linear_each(const Tensor& x, const std::vector<Tensor>& weights,
                                const std::vector<std::optional<Tensor>>& biases) {
  WORKHORSE_CHECK(weights.size() == biases.size(), "workhorse: weights and biases differ in number");
  const ScalarType type = x.scalar_type();
  const Given given(x);
  std::vector<Tensor> ys;
  for (size_t n = 0; n < weights.size(); n++) {
    WORKHORSE_CHECK(weights[n].dim() == 2, "workhorse: weight must have two axes");
    const int64_t out = weights[n].size(0);
    check(weights[n], type, {out, given.in}, "weight");
    if (biases[n]) check(*biases[n], type, {out}, "bias");
    ys.push_back(given.room(out));
  }
  if (type == ScalarType::BFloat16)
    multiply<BFloat16>(given, weights, biases, ys);
  else if (type == ScalarType::Float)
    multiply<float>(given, weights, biases, ys);
  else
    WORKHORSE_CHECK(false, "workhorse: x must be bfloat16 or float32");
  return ys;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return linear_each(x, {weight}, {bias})[0];
}

template <class T>
attend::Heads<T> heads_of(const Tensor& tensor, T* data) {
  return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

template <class T>
attend::Blocks<T> blocks_of(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

template <class T>
void attend_to(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table,
               const Tensor& first, const Tensor& last, double scale, const std::optional<Tensor>& slopes,
               const Tensor& y) {
  const int64_t kv_heads = k.size(0), width = q.size(3), value_width = v.size(3);
  const int64_t slots = table.size(1) * k.size(2), heads_of_all_rows = q.size(0) * kv_heads;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t splits = attend::splits_of(threads, heads_of_all_rows, q.size(1) / kv_heads * q.size(2));
  const attend::Attend<T> work{heads_of(q, data<T>(q)),
                         blocks_of<T>(k),
                         blocks_of<T>(v),
                         heads_of(y, static_cast<T*>(y.mutable_data_ptr())),
                         data<int64_t>(table),
                         data<int64_t>(first),
                         data<int64_t>(last),
                         q.size(1),
                         kv_heads,
                         q.size(2),
                         table.size(1),
                         k.size(2),
                         width,
                         value_width,
                         splits,
                         float(scale),
                         data<float>(slopes)};
  in_threads(heads_of_all_rows * splits, slots * (width + value_width) * sizeof(T),
             [&](int64_t from, int64_t to) { work.run(from, to); });
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table,
              const Tensor& first, const Tensor& last, double scale, const std::optional<Tensor>& slopes) {
  const ScalarType type = q.scalar_type();
  WORKHORSE_CHECK(q.is_cpu() && k.is_cpu() && v.is_cpu() && q.dim() == 4 && k.dim() == 4 &&
                      v.dim() == 4 && k.size(3) == q.size(3) && v.size(0) == k.size(0) &&
                      v.size(1) == k.size(1) && v.size(2) == k.size(2) && k.size(0) > 0 &&
                      q.size(1) % k.size(0) == 0 && k.scalar_type() == type &&
                      v.scalar_type() == type && q.stride(3) == 1 && k.stride(3) == 1 &&
                      v.stride(3) == 1,
                  "workhorse: q, k and v do not match in type, shape or layout");
  WORKHORSE_CHECK(k.size(2) > 0 && k.size(2) % attend::kWide == 0,
                  "workhorse: the slots of a block must be a multiple of 16");
  check(table, ScalarType::Long, {q.size(0), table.dim() == 2 ? table.size(1) : 0}, "table");
  check(first, ScalarType::Long, {q.size(0), q.size(2)}, "first");
  check(last, ScalarType::Long, {q.size(0), q.size(2)}, "last");
  if (slopes) check(*slopes, ScalarType::Float, {q.size(1)}, "slopes");
  Tensor y = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  if (type == ScalarType::BFloat16)
    attend_to<BFloat16>(q, k, v, table, first, last, scale, slopes, y);
  else if (type == ScalarType::Float)
    attend_to<float>(q, k, v, table, first, last, scale, slopes, y);
  else
    WORKHORSE_CHECK(false, "workhorse: q must be bfloat16 or float32");
  return y;
}

template <class T>
void argmax_of(const Tensor& logits, int64_t* tokens) {
  const int64_t count = logits.size(1), stride = logits.stride(0);
  const T* rows = static_cast<const T*>(logits.const_data_ptr());
  in_threads(logits.size(0), count * sizeof(T), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; r++) tokens[r] = argmax::argmax(rows + r * stride, count);
  });
}

Tensor argmax(const Tensor& logits) {
  const ScalarType type = logits.scalar_type();
  WORKHORSE_CHECK(logits.is_cpu() && logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1,
                  "workhorse: logits must be (batch, vocab) on the CPU, with contiguous rows");
  Tensor tokens = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
  if (type == ScalarType::BFloat16)
    argmax_of<BFloat16>(logits, to);
  else if (type == ScalarType::Float)
    argmax_of<float>(logits, to);
  else
    WORKHORSE_CHECK(false, "workhorse: logits must be bfloat16 or float32");
  return tokens;
}

template <class T, int Bits>
void multiply_packed(const T* x, const packed_linear::PackedWeight<Bits>& weight, const T* bias, T* y, int64_t rows,
                     int64_t out) {
  const int64_t row_bytes = weight.groups * packed_linear::kGroup * sizeof(T);
  const int64_t block_bytes = weight.groups * weight.bytes;
  const int64_t blocks = (out + packed_linear::kLanes - 1) / packed_linear::kLanes;
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, BFloat16>)
    if (rows >= packed_linear::kManyRows && tiles_allowed()) {
      const int64_t pass = std::max<int64_t>(1, kPassBytes / row_bytes / kTile) * kTile;
      for (int64_t r = 0; r < rows; r += pass) {
        const int64_t in = weight.groups * packed_linear::kGroup;
        packed_linear::PackedTiles<Bits> tiled{weight, x + r * in, bias, y + r * out, std::min(pass, rows - r), out};
        in_threads(tiled.tiles, row_bytes * kTile,
                   [&](int64_t from, int64_t to) { tiled.pack(from, to); });
        in_threads((blocks + 1) / 2, 2 * block_bytes,
                   [&](int64_t from, int64_t to) { tiled.run(from, to); });
      }
      return;
    }
#endif
  std::vector<packed_linear::Fixed> fixed(rows * weight.groups);
  const packed_linear::PackedLinear<Bits, T> product{weight, x, bias, y, rows, out, fixed.data()};
  in_threads(rows, row_bytes, [&](int64_t from, int64_t to) { product.pack(from, to); });
  in_threads(blocks, block_bytes, [&](int64_t from, int64_t to) { product.run(from, to); });
}

// One weight, or one weight for each group of rows; group i ends before row ends[i].
template <class T, int Bits>
void packed_rows(const Given& given, const Tensor& codes, const Tensor& scales,
                 const std::optional<Tensor>& levels, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& ends, const Tensor& made) {
  const int64_t blocks = scales.size(-3), groups = scales.size(-2), out = made.size(-1);
  const T* x = data<T>(given.x);
  T* y = static_cast<T*>(made.mutable_data_ptr());
  packed_linear::PackedWeight<Bits> weight{data<uint8_t>(codes), data<BFloat16>(scales), data<uint8_t>(levels),
                                           groups};
  const auto rows = [&](int64_t begin, int64_t end) {
    if (begin < end)
      multiply_packed<T>(x + begin * given.in, weight, data<T>(bias), y + begin * out, end - begin, out);
  };
  if (!ends) return rows(0, given.rows);
  int64_t begin = 0;
  for (int64_t i = 0; i < ends->size(0); i++) {
    const int64_t end = data<int32_t>(ends)[i];
    WORKHORSE_CHECK(begin <= end && end <= given.rows,
                    "workhorse: ends must not decrease or exceed the rows of x");
    rows(begin, end);
    begin = end;
    weight.codes += blocks * groups * weight.bytes;
    weight.scales += blocks * groups * packed_linear::kLanes;
  }
}

Tensor packed_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                     const std::optional<Tensor>& levels, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& ends, int64_t out) {
  WORKHORSE_CHECK(codes.dim() == (ends ? 4 : 3), "workhorse: codes must have ", ends ? 4 : 3, " axes");
  const Given given(x);
  const ScalarType type = x.scalar_type();
  const int64_t blocks = (out + packed_linear::kLanes - 1) / packed_linear::kLanes, groups = codes.size(-2);
  const int64_t bytes = levels ? packed_linear::PackedWeight<4>::bytes : packed_linear::PackedWeight<8>::bytes;
  WORKHORSE_CHECK((type == ScalarType::BFloat16 || type == ScalarType::Float) &&
                      given.in == groups * packed_linear::kGroup,
                  "workhorse: x must be bfloat16 or float32, and as wide as the groups of codes");
  if (ends) {
    check(*ends, ScalarType::Int, {codes.size(0)}, "ends");
    check(codes, ScalarType::Byte, {codes.size(0), blocks, groups, bytes}, "codes");
    check(scales, ScalarType::Short, {codes.size(0), blocks, groups, packed_linear::kLanes}, "scales");
  } else {
    check(codes, ScalarType::Byte, {blocks, groups, bytes}, "codes");
    check(scales, ScalarType::Short, {blocks, groups, packed_linear::kLanes}, "scales");
  }
  if (levels) check(*levels, ScalarType::Byte, {packed_linear::kLanes}, "levels");
  if (bias) check(*bias, type, {out}, "bias");
  const bool wide = type == ScalarType::Float;
  const auto multiply = levels ? wide ? packed_rows<float, 4> : packed_rows<BFloat16, 4>
                               : wide ? packed_rows<float, 8> : packed_rows<BFloat16, 8>;
  const Tensor y = given.room(out);
  multiply(given, codes, scales, levels, bias, ends, y);
  return y;
}

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY(workhorse, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linear_each(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor table, Tensor first, Tensor last, float scale, "
      "Tensor? slopes) -> Tensor");
  m.def("argmax(Tensor logits) -> Tensor");
  m.def(
      "packed_linear(Tensor x, Tensor codes, Tensor scales, Tensor? levels, Tensor? bias, "
      "Tensor? ends, int out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  m.impl("linear", TORCH_BOX(&workhorse::bindings::linear));
  m.impl("linear_each", TORCH_BOX(&workhorse::bindings::linear_each));
  m.impl("attend", TORCH_BOX(&workhorse::bindings::attend));
  m.impl("argmax", TORCH_BOX(&workhorse::bindings::argmax));
  m.impl("packed_linear", TORCH_BOX(&workhorse::bindings::packed_linear));
}
