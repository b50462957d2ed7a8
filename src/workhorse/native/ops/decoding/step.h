// A decoding step as a program: one instruction for each module of the model that computes something.
//
// Values are in registers, which are matrices with a row for each token. A packed register holds fixed-point elements
// for matmuls with packed weights. An instruction that `joins` the one before it runs right after it for each row;
// together they form a stage. The threads divide a stage by outputs or by rows, so no sum depends on the number of
// threads. A stage whose first instruction `waits` begins with a barrier; execute/lower/program.py decides
// which stages wait.
#pragma once

#include <cstddef>
#include <vector>

#include "ops/activations.h"
#include "ops/decoding/attend.h"
#include "ops/decoding/experts.h"
#include "ops/decoding/linear.h"
#include "ops/decoding/linear_tiles.h"
#include "ops/decoding/packed_linear.h"
#include "ops/decoding/team.h"
#include "ops/gemm/few_rows.h"
#include "ops/gemm/fewest_rows.h"
#include "ops/moments.h"

namespace workhorse::step {

// Operations on the registers `to`, `from` and `other`, with the weights of index `weight` and `bias` (-1 for none).
// The comment on each operation gives the meaning of `options` and `numbers`.
enum class Op : int64_t {
  kEmbed,         // to = rows of weight, by token
  kEmbedPosition,  // to = rows of weight, by position + options[0]
  kScale,         // to = from · numbers[0]
  kAdd,           // to = from + other
  kNorm,          // to = norm(from) · (weight + numbers[1]) + bias, in slices of options[0] elements; [1]: flags;
                  // only of the elements [options[2], options[3])
  kActivate,      // to = act(from), times other if given; options[0]: Activation
  kLinear,        // to = from weightᵀ + bias, options[0] outputs
  kPack,          // to, packed, = from
  kPackedLinear,  // kLinear with packed from; options[1]: scales, [2]: levels or -1
  kRotate,        // to is rotated in heads of options[0] elements; [1]: angles, [2]: flags
  kStore,         // stores from and other in the cache, as keys and values; options[0]: layer, [1]: table
  kAttend,        // to = attention of from, options[0] heads; [1]: layer, [2]: table, [3]: reach; numbers[0]: scale,
                  // [1]: softcap or 0; weight: ALiBi's slopes, float32; bias: sinks
  kLast,          // to = the rows of from whose logits are wanted; later instructions have only these rows
  kConvolve,      // to = from + Σ weight[i] · the input i tokens before, read from the cache for i > 0; options[0]: layer,
                  // [1]: table, [2]: number of tokens i
  kCap,           // to = numbers[0] · tanh(from / numbers[0])
  kClip,          // to = from between -numbers[0] and numbers[0]
  kMultiply,      // to = from · other, whose row has the same width or one element
  kGrow,          // to = from · (1 + numbers[0] · ln(1 + floor((position + options[1]) / options[0])))
  kClampedSwiglu,  // to = g · sigmoid(numbers[1] g) · (u + 1), g = from and u = other up to the limit numbers[0]
  kWave,          // to = sines and cosines of weight · (position + options[0]), alternating, or in halves if options[1]
  kXielu,         // to = xIELU(from), whose parameters are weight and bias, of one element each
  // Mixtures of experts. Registers hold logits in float32, and pairs of token and expert as `Choice`. The register
  // of choices has the end of each expert's pairs behind those of the first token.
  kScore,         // to, logits, = from weightᵀ + bias in float32
  kChoose,        // to, choices, = the best options[0] experts by the logits from; [1]: flags of the router, [2] and [3]:
                  // number of groups and of the best ones; numbers: scale and jitter; weight: bias of the ranks, float32
  kOrder,         // to, choices, is sorted by expert; options[0]: choices of a token, [1]: experts
  kSend,          // to = the row of from for each pair of other; options[0]: choices of a token, [1]: 1 to weigh it
  kExpert,        // to = from weightᵀ + bias of the expert of each pair of other; options[0]: outputs, [1]: experts,
                  // [2]: choices of a token
  kGather,        // to = sum of the rows of from for the pairs of a token; options as of kSend
};

enum class Activation : int64_t { kRelu, kReluSquared, kGelu, kGeluTanh, kSilu, kSigmoid };

// True if an instruction computes each row only from the same row of its inputs.
constexpr bool rowwise(Op op) {
  switch (op) {
    case Op::kLinear:
    case Op::kPackedLinear:
    case Op::kAttend:
    case Op::kLast:
    case Op::kConvolve:
    case Op::kScore:
    case Op::kOrder:
    case Op::kSend:
    case Op::kExpert:
    case Op::kGather: return false;
    default: return true;
  }
}

// Flags in options[1] of a norm, and in options[2] of a rotation.
constexpr int64_t kCentred = 1, kRoundedNormal = 2, kRoundedGain = 4;
constexpr int64_t kInterleaved = 1, kInFloat32 = 2;

struct Instruction {
  Op op;
  int64_t waits, joins, to, from, other, weight, bias, options[4];
};

struct Register {
  std::byte* at;
  int64_t width;  // elements in a row
};

// The keys or values of a layer.
template <class T>
struct Stored {
  T* data;
  int64_t head_stride, block_stride, slot_stride, heads, width;
};

// The block table of each sequence, (batch, blocks).
struct BlockTable {
  const int64_t* at;
  int64_t blocks;
};

// Cosines and sines, (positions, pairs) each.
struct Angles {
  const void *cos, *sin;
  int64_t pairs;
};

// Consecutive sequences with the same number of new tokens.
struct Batch {
  int64_t sequence, sequences, seq, token;  // first sequence, number of sequences, tokens of each, first token
};

// The slots that the tokens of a pass see in layers with the same window or chunk.
struct Seen {
  std::vector<int64_t> first, last;
};

template <class T>
struct Pass {
  const Instruction* instructions;
  const double* numbers;  // two for each instruction
  int64_t count;
  std::vector<Register> registers;
  std::vector<const void*> weights;
  std::vector<Angles> angles;
  std::vector<Stored<T>> keys, values;
  std::vector<BlockTable> tables;
  std::vector<Seen> seen;
  std::vector<Batch> batches;
  const int64_t *tokens, *positions, *sequences;  // id, position and sequence of each token
  int64_t total, block;                           // number of tokens; slots of a block
  int64_t few;                        // maximum rows for dot products in linear layers; for more, gemms
  const int64_t* wanted;  // the tokens whose logits are wanted
  int64_t wanted_count;
  int64_t shares;

  // The work of one thread; [from, to) are its shares.
  void run(Team& team, int64_t from, int64_t to) const {
    int64_t rows = total;
    int64_t in_order = -1;
    for (int64_t i = 0, next; i < count; i = next) {
      const Instruction& now = instructions[i];
      for (next = i + 1; next < count && instructions[next].joins;) next++;
      if (now.waits) team.wait(to - from);
      if (now.op == Op::kLast) rows = wanted_count;
      const auto divide = [&](int64_t units, const auto& unit) { team.divide(i, from, units, unit); };
      if (rowwise(now.op))
        divide(rows, [&](int64_t r) {
          for (int64_t j = i; j < next; j++) work_on_row(instructions[j], numbers + 2 * j, r);
        });
      else work_together(now, numbers + 2 * i, rows, in_order, divide);
      for (int64_t j = i; j < next; j++)
        if (instructions[j].to == in_order) in_order = -1;
    }
  }

 private:
  static constexpr int64_t kUnitBytes = 1 << 15;   // bytes of weights that a thread reads at a time
  static constexpr int64_t kUnitColumns = 1 << 7;  // columns of a gemm per unit, approximately

  T* row(int64_t reg, int64_t r) const {
    return (T*)registers[reg].at + r * registers[reg].width;
  }
  packed_linear::Fixed* fixed(int64_t reg) const { return (packed_linear::Fixed*)registers[reg].at; }
  int64_t width(int64_t reg) const { return registers[reg].width; }
  template <class W>
  const W* weight(int64_t number) const {
    return number < 0 ? nullptr : static_cast<const W*>(weights[number]);
  }

  void work_on_row(const Instruction& now, const double* number, int64_t r) const {
    switch (now.op) {
      case Op::kEmbed: return look_up(now, tokens[r], r);
      case Op::kEmbedPosition: return look_up(now, positions[r] + now.options[0], r);
      case Op::kScale: return scale(now, float(number[0]), r);
      case Op::kAdd: return add(now, r);
      case Op::kNorm: return norm(now, number, r);
      case Op::kActivate: return activate(now, r);
      case Op::kPack: return pack(now, r);
      case Op::kRotate: return rotate(now, r);
      case Op::kStore: return store(now, r);
      case Op::kCap: return cap(now, float(number[0]), r);
      case Op::kClip: return clip(now, float(number[0]), r);
      case Op::kMultiply: return multiply(now, r);
      case Op::kGrow: return grow(now, float(number[0]), r);
      case Op::kWave: return wave(now, r);
      case Op::kClampedSwiglu: return clamped_swiglu(now, number, r);
      case Op::kXielu: return xielu(now, r);
      case Op::kChoose: return choose(now, number, r);
      default: return;
    }
  }

  // Divides an instruction into units by `divide(units, function of a unit)`. `in_order`: the register whose rows
  // this thread has packed for gemms, or -1.
  template <class Divide>
  void work_together(const Instruction& now, const double* number, int64_t rows, int64_t& in_order,
                     const Divide& divide) const {
    switch (now.op) {
      case Op::kLinear: return rows > few ? gemm(now, rows, in_order, divide) : linear(now, rows, divide);
      case Op::kPackedLinear:
        return now.options[2] < 0 ? packed<8>(now, rows, divide) : packed<4>(now, rows, divide);
      case Op::kAttend: return attend(now, number, divide);
      case Op::kConvolve: return divide(rows, [&](int64_t r) { convolve(now, r); });
      case Op::kScore: return score(now, rows, divide);
      case Op::kOrder: return divide(1, [&](int64_t) { sort(now, rows); });
      case Op::kSend: return divide(rows, [&](int64_t r) { send(now, r); });
      case Op::kExpert: return expert(now, divide);
      case Op::kGather: return divide(rows, [&](int64_t r) { gather_pairs(now, r); });
      case Op::kLast:
        return divide(rows,
                      [&](int64_t r) { std::copy_n(row(now.from, wanted[r]), width(now.to), row(now.to, r)); });
      default: return;
    }
  }

  void look_up(const Instruction& now, int64_t number, int64_t r) const {
    std::copy_n(weight<T>(now.weight) + number * width(now.to), width(now.to), row(now.to, r));
  }

  void scale(const Instruction& now, float by, int64_t r) const {
    const T* const x = row(now.from, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) { write(y + j, read<V>(x + j) * by); });
  }

  // Rounds after every operation, as the modules do.
  void cap(const Instruction& now, float bound, int64_t r) const {
    const T* const x = row(now.from, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) {
      const F32x16 all = hyperbolic_tangent(held_by<T>(read<V>(x + j) / bound) - F32x16{});
      V value;
      if constexpr (kCount<V> == 1) value = all[0];
      else value = all;
      write(y + j, held_by<T>(value) * bound);
    });
  }

  void clip(const Instruction& now, float bound, int64_t r) const {  // keeps NaN
    const T* const x = row(now.from, r);
    T* const y = row(now.to, r);
    for (int64_t j = 0; j < width(now.to); j++) {
      const float value = to_float(x[j]);
      workhorse::store(y + j, value < -bound ? -bound : value > bound ? bound : value);
    }
  }

  void multiply(const Instruction& now, int64_t r) const {
    const T *const x = row(now.from, r), *const other = row(now.other, r);
    T* const y = row(now.to, r);
    const bool one = width(now.other) == 1;
    each(width(now.to), [&]<class V>(V, int64_t j) {
      if (one) write(y + j, read<V>(x + j) * to_float(*other));
      else write(y + j, read<V>(x + j) * read<V>(other + j));
    });
  }

  void clamped_swiglu(const Instruction& now, const double* number, int64_t r) const {
    const float limit = float(number[0]), alpha = float(number[1]);
    const T *const gate = row(now.from, r), *const up = row(now.other, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) {
      const F32x16 most = F32x16{} + limit, all = read<V>(gate + j) - F32x16{}, other = read<V>(up + j) - F32x16{};
      const F32x16 g = select(all > most, most, all);
      const F32x16 u = select(other > most, most, select(other < -most, -most, other));
      const F32x16 scaled = held_by<T>(g * alpha);
      const F32x16 gated = held_by<T>(g * held_by<T>(activations::sigmoid(scaled).value));
      const F32x16 all_values = gated * held_by<T>(u + 1.0f);
      if constexpr (kCount<V> == 1) write(y + j, all_values[0]);
      else write(y + j, all_values);
    });
  }

  void grow(const Instruction& now, float by, int64_t r) const {
    const int64_t stretches = (positions[r] + now.options[1]) / now.options[0];
    T factor;
    workhorse::store(&factor, 1 + by * std::log1p(float(stretches)));
    const T* const x = row(now.from, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) { write(y + j, read<V>(x + j) * to_float(factor)); });
  }

  void wave(const Instruction& now, int64_t r) const {
    const float *const speeds = weight<float>(now.weight), at = float(positions[r] + now.options[0]);
    const int64_t n = width(now.to), half = (n + 1) / 2;
    const bool halves = now.options[1];
    T* const y = row(now.to, r);
    for (int64_t i = 0; i < half; i++) {
      const float angle = at * speeds[i];
      const int64_t cosine = halves ? half + i : 2 * i + 1;
      workhorse::store(y + (halves ? i : 2 * i), std::sin(angle));
      if (cosine < n) workhorse::store(y + cosine, std::cos(angle));
    }
  }

  // x > 0: a x² + x / 2, else (e^x - 1 - x) b + x / 2, with a = softplus(weight) and b = 1 / 2 + softplus(bias).
  void xielu(const Instruction& now, int64_t r) const {
    const auto softplus = [](float x) { return x > 20 ? x : std::log1p(std::exp(x)); };
    const float above = softplus(to_float(*weight<T>(now.weight)));
    const float below = 0.5f + softplus(to_float(*weight<T>(now.bias)));
    const T* const x = row(now.from, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) {
      const F32x16 all = read<V>(x + j) - F32x16{}, least = select(all < -1e-6f, all, F32x16{} - 1e-6f);
      F32x16 near = fma(least, 1.0f / 40320, 1.0f / 5040);  // e^x - 1 - x cancels near 0
      for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) near = fma(near, least, factor);
      const F32x16 bent = select(least > -0.5f, near * least * least + (least - all), exponential(least) - 1.0f - all);
      const F32x16 found = select(all > 0.0f, all * all * above, bent * below) + all * 0.5f;
      if constexpr (kCount<V> == 1) write(y + j, found[0]);
      else write(y + j, found);
    });
  }

  using Choice = experts::Choice;

  // The choices of a token, and behind those of the first one the end of each expert's pairs.
  Choice* choices(int64_t reg, int64_t r) const { return (Choice*)row(reg, r); }
  int32_t* ends(int64_t reg, int64_t top_k) const { return (int32_t*)(choices(reg, 0) + top_k); }
  int64_t floats(int64_t reg) const { return width(reg) * sizeof(T) / sizeof(float); }

  template <class Divide>
  void score(const Instruction& now, int64_t rows, const Divide& divide) const {
    constexpr int64_t size = 8;
    const int64_t in = width(now.from), count = floats(now.to);
    const T *const w = weight<T>(now.weight), *const bias = weight<T>(now.bias);
    divide((count + size - 1) / size, [&](int64_t unit) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t e = unit * size; e < std::min(count, (unit + 1) * size); e++) {
          Sum total;
          each(in, [&]<class V>(V, int64_t j) { total.add_product(read<V>(row(now.from, r) + j), read<V>(w + e * in + j)); });
          ((float*)row(now.to, r))[e] = float(total) + (bias ? to_float(bias[e]) : 0);
        }
    });
  }

  void choose(const Instruction& now, const double* number, int64_t r) const {
    const int64_t* const options = now.options;
    const experts::Router router{options[0], options[1], options[2], options[3], float(number[0]), float(number[1])};
    experts::Chooser((float*)row(now.from, r), floats(now.from), weight<float>(now.weight), router).run(choices(now.to, r));
  }

  void sort(const Instruction& now, int64_t rows) const {
    const int64_t top_k = now.options[0], count = now.options[1];
    const auto pair = [&](int64_t n) -> Choice& { return choices(now.to, n / top_k)[n % top_k]; };
    int32_t* const end = ends(now.to, top_k);
    std::fill_n(end, count, 0);
    for (int64_t n = 0; n < rows * top_k; n++) end[pair(n).expert]++;
    for (int64_t e = 1; e < count; e++) end[e] += end[e - 1];
    for (int64_t n = rows * top_k; n-- > 0;) pair(n).place = --end[pair(n).expert];  // now the begin of each expert
    for (int64_t n = 0; n < rows * top_k; n++) end[pair(n).expert]++;
  }

  void send(const Instruction& now, int64_t r) const {
    const int64_t n = width(now.from);
    for (int64_t k = 0; k < now.options[0]; k++) {
      const Choice& choice = choices(now.other, r)[k];
      const T* const x = row(now.from, r);
      T* const y = row(now.to, 0) + choice.place * n;
      if (now.options[1]) each(n, [&]<class V>(V, int64_t j) { write(y + j, read<V>(x + j) * choice.weight); });
      else std::copy_n(x, n, y);
    }
  }

  template <class Divide>
  void expert(const Instruction& now, const Divide& divide) const {
    const int64_t columns = now.options[0], count = now.options[1], top_k = now.options[2];
    const int64_t in = width(now.from) / top_k;
    const int64_t size = std::max<int64_t>(1, kUnitBytes / (in * sizeof(T)) / linear::kTogether) * linear::kTogether;
    const int64_t parts = (columns + size - 1) / size;
    const int32_t* const end = ends(now.other, top_k);
    divide(count * parts, [&](int64_t unit) {
      const int64_t e = unit / parts, begin = e ? end[e - 1] : 0, first = unit % parts * size;
      if (begin == end[e]) return;
      const T *const w = weight<T>(now.weight), *const bias = weight<T>(now.bias);
      const linear::Layer<T> layer{w + e * columns * in, bias ? bias + e * columns : nullptr,
                                   row(now.to, 0) + begin * columns, columns};
      linear::Rows<T>{row(now.from, 0) + begin * in, end[e] - begin, in}.run(layer, first, std::min(columns, first + size));
    });
  }

  void gather_pairs(const Instruction& now, int64_t r) const {
    const int64_t n = width(now.to), top_k = now.options[0];
    const Choice* const all = choices(now.other, r);
    each(n, [&]<class V>(V, int64_t j) {
      V total{};
      for (int64_t k = 0; k < top_k; k++) {
        const V value = read<V>(row(now.from, 0) + all[k].place * n + j);
        total += now.options[1] ? value : value * all[k].weight;
      }
      write(row(now.to, r) + j, total);
    });
  }

  void add(const Instruction& now, int64_t r) const {
    const T *a = row(now.from, r), *b = row(now.other, r);
    T* const y = row(now.to, r);
    each(width(now.to), [&]<class V>(V, int64_t j) { write(y + j, read<V>(a + j) + read<V>(b + j)); });
  }

  void norm(const Instruction& now, const double* number, int64_t r) const {
    const int64_t n = now.options[0], how = now.options[1];
    const T *gain = weight<T>(now.weight), *shift = weight<T>(now.bias);
    const float eps = float(number[0]), offset = float(number[1]);
    for (int64_t part = now.options[2]; part < now.options[3]; part += n) {
      const T* const x = row(now.from, r) + part;
      T* const y = row(now.to, r) + part;
      const Moments part_moments = moments(n, x, eps, how & kCentred);
      each(n, [&]<class V>(V, int64_t j) {
        V normal = (read<V>(x + j) - part_moments.mean) * part_moments.rstd;
        if (how & kRoundedNormal) normal = held_by<T>(normal);
        V by = gain ? read<V>(gain + j) + offset : V{} + 1.0f;
        if (how & kRoundedGain) by = held_by<T>(by);
        write(y + j, fma(normal, by, shift ? read<V>(shift + j) : V{}));  // as in training
      });
    }
  }

  void activate(const Instruction& now, int64_t r) const {
    const auto by = [&](auto function) {
      const T* const x = row(now.from, r);
      const T* const other = now.other < 0 ? nullptr : row(now.other, r);
      T* const y = row(now.to, r);
      each(width(now.to), [&]<class V>(V, int64_t j) {
        const F32x16 all = decltype(function)::of(read<V>(x + j) - F32x16{}).value;
        V value;
        if constexpr (kCount<V> == 1) value = all[0];
        else value = all;
        if (other) value = held_by<T>(value) * read<V>(other + j);
        write(y + j, value);
      });
    };
    switch (Activation(now.options[0])) {
      case Activation::kRelu: return by(activations::Relu{});
      case Activation::kReluSquared: return by(activations::ReluSquared{});
      case Activation::kGelu: return by(activations::Gelu{});
      case Activation::kGeluTanh: return by(activations::GeluTanh{});
      case Activation::kSilu: return by(activations::Silu{});
      case Activation::kSigmoid: return by(activations::Sigmoid{});
    }
  }

  template <class Divide>
  void linear(const Instruction& now, int64_t rows, const Divide& divide) const {
    const int64_t in = width(now.from), out = now.options[0];
    const int64_t size = std::max<int64_t>(1, kUnitBytes / (in * sizeof(T)) / linear::kTogether) * linear::kTogether;
    const linear::Layer<T> layer{weight<T>(now.weight), weight<T>(now.bias), row(now.to, 0), out};
    const linear::Rows<T> all{row(now.from, 0), rows, in};
    divide((out + size - 1) / size,
           [&](int64_t unit) { all.run(layer, unit * size, std::min(out, (unit + 1) * size)); });
  }

  // A unit has some outputs of all rows. Gemms that read the same register pack it once on each thread.
  template <class Divide>
  void gemm(const Instruction& now, int64_t rows, int64_t& in_order, const Divide& divide) const {
    using namespace gemm_vectors;
    const int64_t in = width(now.from), out = now.options[0];
    const T *const x = row(now.from, 0), *const w = weight<T>(now.weight), *const bias = weight<T>(now.bias);
    T* const y = row(now.to, 0);
    const int64_t most = std::min(kUnitColumns, out / (4 * shares) + 1);
    thread_local ScratchBuffer buffer;
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, BFloat16>)
      if (tiles_allowed()) {
        linear::TiledRows tiled{x, rows, in};
        const linear::Layer<T> layer{w, bias, y, out};
        const int64_t size = even_part(out, most, linear::kHigh);
        return divide((out + size - 1) / size, [&](int64_t unit) {
          const Tiles tiles;
          tiled.b = (uint32_t*)buffer.at_least(tiled.room() * sizeof(uint32_t));
          if (in_order != now.from) tiled.pack(0, tiled.columns);
          in_order = now.from;
          tiled.run(layer, unit * size, std::min(out, (unit + 1) * size));
        });
      }
#endif
    const bool in_place = FewRows<T>::suits(in), fewest = rows <= FewestRows<T>::kMost;
    const int64_t step = !in_place ? kWide : fewest ? FewestRows<T>::kLanes : kHigh;
    const int64_t size = even_part(out, most, step), units = (out + size - 1) / size;
    if (!in_place) {
      const Product<T> product{{{{x, in, true}, {w, in, true}, in}}, y, out, bias};
      return divide(units, [&](int64_t unit) { product.run(0, rows, unit * size, std::min(out, (unit + 1) * size)); });
    }
    const auto each_unit = [&](const auto& product) {
      divide(units, [&](int64_t unit) {
        // Allocate only here: growing the memory loses the rows that a thread without units has packed.
        Word* const packed = (Word*)buffer.at_least(product.room() * sizeof(Word));
        if (in_order != now.from) product.pack(packed);
        in_order = now.from;
        product.run(packed, unit * size, std::min(out, (unit + 1) * size));
      });
    };
    if (fewest) each_unit(FewestRows<T>{x, w, rows, in, y, out, bias});
    else each_unit(FewRows<T>{x, w, rows, in, y, out, bias});
  }

  void pack(const Instruction& now, int64_t r) const {
    const int64_t groups = width(now.from) / packed_linear::kGroup;
    packed_linear::pack(row(now.from, r), groups, fixed(now.to) + r * groups);
  }

  template <int Bits, class Divide>
  void packed(const Instruction& now, int64_t rows, const Divide& divide) const {
    using namespace packed_linear;
    const int64_t groups = width(now.from) / kGroup, out = now.options[0], blocks = (out + kLanes - 1) / kLanes;
    const PackedWeight<Bits> codes{weight<uint8_t>(now.weight), weight<BFloat16>(now.options[1]),
                                   weight<uint8_t>(now.options[2]), groups};
    const PackedLinear<Bits, T> product{codes, nullptr, weight<T>(now.bias), row(now.to, 0), rows, out,
                                        fixed(now.from)};
    const int64_t size = std::max<int64_t>(1, kUnitBytes / (groups * codes.bytes));
    divide((blocks + size - 1) / size,
           [&](int64_t unit) { product.run(unit * size, std::min(blocks, (unit + 1) * size)); });
  }

  void rotate(const Instruction& now, int64_t r) const {
    for (int64_t h = 0; h < width(now.to); h += now.options[0]) rotate(now, positions[r], row(now.to, r) + h);
  }

  // Rotates the pairs of a head in place, in float32 or rounded to T after every operation.
  void rotate(const Instruction& now, int64_t position, T* head) const {
    const Angles& by = angles[now.options[1]];
    const int64_t pairs = by.pairs, at = position * pairs;
    const bool interleaved = now.options[2] & kInterleaved;
    const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
    const auto rotate_by = [&](auto cos, auto sin, auto kept) {
      each(pairs, [&]<class V>(V, int64_t i) {
        T *const a = head + i * step, *const b = a + apart;
        const V x = gather<V>(a, step), y = gather<V>(b, step), c = read<V>(cos + at + i), s = read<V>(sin + at + i);
        scatter(a, step, kept(x * c) - kept(y * s));
        scatter(b, step, kept(y * c) + kept(x * s));
      });
    };
    if (now.options[2] & kInFloat32)
      rotate_by((const float*)by.cos, (const float*)by.sin, [](auto value) { return value; });
    else
      rotate_by((const T*)by.cos, (const T*)by.sin, [](auto value) { return held_by<T>(value); });
  }

  void store(const Instruction& now, int64_t r) const {
    const int64_t layer = now.options[0], table = now.options[1];
    store(keys[layer], table, r, row(now.from, r));
    store(values[layer], table, r, row(now.other, r));
  }

  void store(const Stored<T>& to, int64_t table, int64_t r, const T* from) const {
    T* const at = slot(to, table, r, positions[r]);
    for (int64_t h = 0; h < to.heads; h++) std::copy_n(from + h * to.width, to.width, at + h * to.head_stride);
  }

  // The first head of what a layer stores for a position of the sequence of row r.
  T* slot(const Stored<T>& in, int64_t table, int64_t r, int64_t position) const {
    const int64_t number = tables[table].at[sequences[r] * tables[table].blocks + position / block];
    return in.data + number * in.block_stride + position % block * in.slot_stride;
  }

  // Rounds after every operation, in the order of `nn.convolution`.
  void convolve(const Instruction& now, int64_t r) const {
    const int64_t n = width(now.to), tokens = std::min(now.options[2], positions[r] + 1);
    const T *const x = row(now.from, r), *const w = weight<T>(now.weight);
    T* const y = row(now.to, r);
    for (int64_t i = 0; i < tokens; i++) {
      const T* const earlier = i ? slot(keys[now.options[0]], now.options[1], r, positions[r] - i) : x;
      const T* const sum = i ? y : x;
      each(n, [&]<class V>(V, int64_t j) {
        const V term = held_by<T>(read<V>(earlier + j) * read<V>(w + i * n + j));
        write(y + j, read<V>(sum + j) + term);
      });
    }
  }

  template <class Divide>
  void attend(const Instruction& now, const double* number, const Divide& divide) const {
    const int64_t kv_heads = keys[now.options[1]].heads;
    std::vector<attend::Attend<T>> parts;
    std::vector<int64_t> ends;  // cumulative number of units of the batches
    int64_t units = 0, in_all = 0;
    for (const Batch& batch : batches) in_all += batch.sequences * kv_heads;
    for (const Batch& batch : batches) {
      parts.push_back(attention(now, number, batch, in_all));
      ends.push_back(units += batch.sequences * kv_heads * parts.back().splits);
    }
    divide(units, [&](int64_t unit) {
      size_t n = 0;
      while (unit >= ends[n]) n++;
      const int64_t own = unit - (n ? ends[n - 1] : 0);
      parts[n].run(own, own + 1);
    });
  }

  // The attention of a batch; `in_all`: key heads of all sequences.
  attend::Attend<T> attention(const Instruction& now, const double* number, const Batch& batch, int64_t in_all) const {
    const int64_t heads = now.options[0], seq = batch.seq;
    const Stored<T>&k = keys[now.options[1]], &v = values[now.options[1]];
    const BlockTable& table = tables[now.options[2]];
    const Seen& slots = seen[now.options[3]];
    const auto heads_of = [&](auto* data, int64_t width) {
      return attend::Heads<std::remove_pointer_t<decltype(data)>>{data, seq * heads * width, width, heads * width};
    };
    const auto blocks_of = [](const Stored<T>& of) {
      return attend::Blocks<T>{of.data, of.head_stride, of.block_stride, of.slot_stride};
    };
    return {heads_of((const T*)row(now.from, batch.token), k.width),
            blocks_of(k),
            blocks_of(v),
            heads_of(row(now.to, batch.token), v.width),
            table.at + batch.sequence * table.blocks,
            slots.first.data() + batch.token,
            slots.last.data() + batch.token,
            heads,
            k.heads,
            seq,
            table.blocks,
            block,
            k.width,
            v.width,
            attend::splits_of(shares, in_all, heads / k.heads * seq),
            float(number[0]),
            weight<float>(now.weight),
            float(number[1]),
            weight<T>(now.bias)};
  }
};

}  // namespace workhorse::step
