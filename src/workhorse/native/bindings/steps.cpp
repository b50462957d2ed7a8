// A whole decoding step for PyTorch: it checks, allocates scratch memory, and runs one parallel region.
//
// A program is a matrix of int64 with one instruction per row; ops/decoding/step.h lists the fields of a row.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings/refuse.h"
#include "ops/decoding/step.h"

namespace workhorse::bindings {
namespace {

using step::Instruction, step::Op;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLine = 64;
constexpr int64_t kThreadNumbers = 1 << 21;  // minimum weights times rows per thread

const int64_t* whole(const Tensor& x, int64_t dim, const char* name) {
  WORKHORSE_CHECK(x.is_cpu() && x.is_contiguous() && x.scalar_type() == ScalarType::Long && x.dim() == dim,
                  "workhorse: ", name, " must be contiguous int64 on the CPU, with ", dim, " axes");
  return static_cast<const int64_t*>(x.const_data_ptr());
}

using Weights = std::vector<Tensor>;

// The weights of programs, by id. PyTorch takes half a microsecond to pass a tensor to an operator. For all weights of
// a small model that would be a tenth of a step.
class KeptWeights {
 public:
  int64_t keep(Weights weights) {
    const std::lock_guard lock(mutex_);
    kept_[++last_] = std::make_shared<const Weights>(std::move(weights));
    return last_;
  }

  void drop(int64_t number) {
    decltype(kept_)::node_type dropped;  // freed after the lock, since freeing may drop other weights
    const std::lock_guard lock(mutex_);
    dropped = kept_.extract(number);
  }

  std::shared_ptr<const Weights> at(int64_t number) const {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find(number);
    WORKHORSE_CHECK(found != kept_.end(), "workhorse: no weights are registered with id ", number);
    return found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Weights>> kept_;
  int64_t last_ = 0;
};

KeptWeights& kept_weights() {
  static KeptWeights& all = *new KeptWeights;  // never destroyed: PyTorch may be unloaded by then
  return all;
}

int64_t keep_weights(const Weights& weights) { return kept_weights().keep(weights); }
void drop_weights(int64_t number) { kept_weights().drop(number); }

template <class T>
class Prepared {
 public:
  Prepared(const Tensor& program, const Tensor& numbers, const Tensor& registers, const Weights& weights,
           const std::vector<Tensor>& angles, const Tensor& tokens, const Tensor& counts, const Tensor& lengths,
           const std::vector<Tensor>& tables, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
           const Tensor& reaches, int64_t few, const Tensor& wanted, const Tensor& logits, ScalarType type)
      : weights_(weights), angles_(angles), type_(type) {
    pass_.instructions = reinterpret_cast<const Instruction*>(whole(program, 2, "program"));
    pass_.count = program.size(0);
    WORKHORSE_CHECK(program.size(1) * sizeof(int64_t) == sizeof(Instruction) && numbers.is_contiguous() &&
                        numbers.scalar_type() == ScalarType::Double && numbers.numel() == 2 * pass_.count,
                    "workhorse: a program has ", sizeof(Instruction) / sizeof(int64_t),
                    " integers and two floats for each instruction");
    pass_.numbers = static_cast<const double*>(numbers.const_data_ptr());
    pass_.tokens = whole(tokens, 1, "tokens");
    pass_.total = tokens.size(0);
    pass_.few = few;
    pass_.wanted = whole(wanted, 1, "wanted");
    pass_.wanted_count = wanted.size(0);
    for (int64_t i = 0; i < pass_.wanted_count; i++)
      WORKHORSE_CHECK(pass_.wanted[i] >= 0 && pass_.wanted[i] < pass_.total,
                      "workhorse: logits are requested for a token out of range: ", pass_.wanted[i]);
    WORKHORSE_CHECK(keys.size() == values.size() && !keys.empty() && keys[0].dim() == 4,
                    "workhorse: every layer needs keys and values");
    pass_.block = keys[0].size(2);
    WORKHORSE_CHECK(counts.dim() == 1 && lengths.dim() == 1 && counts.size(0) == lengths.size(0),
                    "workhorse: every sequence needs a length and a number of new tokens");
    place(whole(counts, 1, "counts"), whole(lengths, 1, "lengths"), lengths.size(0), tables, reaches);
    for (size_t layer = 0; layer < keys.size(); layer++) {
      blocks_.push_back(std::min(keys[layer].size(1), values[layer].size(1)));
      pass_.keys.push_back(stored(keys[layer]));
      pass_.values.push_back(stored(values[layer]));
    }
    int64_t numbers_of_weights = 0;
    for (const Tensor& weight : weights) {
      WORKHORSE_CHECK(weight.is_cpu() && weight.is_contiguous(), "workhorse: weights must be contiguous, on the CPU");
      pass_.weights.push_back(weight.const_data_ptr());
      WORKHORSE_CHECK(pass_.weights.back() || weight.numel() == 0, "workhorse: the storage of a weight was freed");
      numbers_of_weights += weight.numel();
    }
    const int64_t worth = numbers_of_weights * pass_.total / kThreadNumbers;
    pass_.shares = std::clamp<int64_t>(worth, 1, torch::stable::get_num_threads());
    keep_angles(angles);
    allocate(whole(registers, 2, "registers"), registers.size(0), logits);
    for (int64_t i = 0; i < pass_.count; i++) {
      const Instruction* const now = pass_.instructions + i;
      WORKHORSE_CHECK(!now->joins || (i > 0 && !now->waits && step::rowwise(now->op) && step::rowwise(now[-1].op)),
                      "workhorse: only a row-wise instruction that does not wait can join a row-wise one");
      check(*now);
    }
  }

  void run() const {
    Team team(pass_.shares, pass_.count);
    // Only a lack of memory throws here. The other threads would wait for this one forever, so it ends the process.
    const auto work = [&](int64_t from, int64_t to) noexcept { pass_.run(team, from, to); };
    torch::stable::parallel_for(0, pass_.shares, 1, work);
  }

 private:
  step::Pass<T> pass_;
  const Weights& weights_;
  const std::vector<Tensor>& angles_;
  ScalarType type_;
  std::vector<int64_t> positions_, sequences_, blocks_;
  std::unique_ptr<std::byte[]> scratch_;
  int64_t longest_ = 0, batch_ = 0;

  // Computes the positions of the tokens, and the slots that each token sees.
  void place(const int64_t* counts, const int64_t* lengths, int64_t batch, const std::vector<Tensor>& tables,
             const Tensor& reaches) {
    batch_ = batch;
    for (int64_t b = 0; b < batch; b++) {
      WORKHORSE_CHECK(counts[b] > 0, "workhorse: every sequence needs a new token");
      if (pass_.batches.empty() || pass_.batches.back().seq != counts[b])
        pass_.batches.push_back({b, 0, counts[b], int64_t(positions_.size())});
      pass_.batches.back().sequences++;
      for (int64_t s = 0; s < counts[b]; s++) {
        positions_.push_back(lengths[b] + s);
        sequences_.push_back(b);
      }
    }
    WORKHORSE_CHECK(int64_t(positions_.size()) == pass_.total, "workhorse: there are ", pass_.total,
                    " tokens for sequences of ", positions_.size());
    pass_.positions = positions_.data();
    pass_.sequences = sequences_.data();
    for (int64_t p : positions_) longest_ = std::max(longest_, p + 1);
    for (const Tensor& table : tables) {
      pass_.tables.push_back({whole(table, 2, "table"), table.size(1)});
      WORKHORSE_CHECK(table.size(0) == batch && table.size(1) * pass_.block >= longest_,
                      "workhorse: a table must have the blocks of every sequence");
    }
    // (reaches, 2): a window and a chunk, 0 for none.
    const int64_t* reach = whole(reaches, 2, "reaches");
    for (int64_t i = 0; i < reaches.size(0); i++, reach += 2) {
      step::Seen seen;
      for (int64_t p : positions_) {
        seen.first.push_back(reach[0]   ? std::max<int64_t>(0, p + 1 - reach[0])
                             : reach[1] ? p / reach[1] * reach[1]
                                        : 0);
        seen.last.push_back(p + 1);
      }
      pass_.seen.push_back(std::move(seen));
    }
  }

  step::Stored<T> stored(const Tensor& x) const {
    WORKHORSE_CHECK(x.is_cpu() && x.dim() == 4 && x.scalar_type() == type_ && x.stride(3) == 1 &&
                        x.size(2) == pass_.block && pass_.block % attend::kWide == 0,
                    "workhorse: keys and values must be (kv_heads, blocks, block, width), of the model's type");
    return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2), x.size(0), x.size(3)};
  }

  void keep_angles(const std::vector<Tensor>& angles) {
    for (size_t i = 0; i + 1 < angles.size(); i += 2) {
      const Tensor &cos = angles[i], &sin = angles[i + 1];
      WORKHORSE_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.dim() == 2 && cos.size(0) >= longest_ &&
                          sin.size(0) == cos.size(0) && sin.size(1) == cos.size(1),
                      "workhorse: angles must be contiguous, (positions, pairs)");
      pass_.angles.push_back({cos.const_data_ptr(), sin.const_data_ptr(), cos.size(1)});
    }
  }

  // Registers are (width, packed flag); the first one holds the logits.
  void allocate(const int64_t* registers, int64_t count, const Tensor& logits) {
    const int64_t rows = pass_.total;
    std::vector<int64_t> begins;
    int64_t bytes = kLine;
    for (int64_t i = 0; i < count; i++) {
      begins.push_back(bytes);
      const int64_t width = registers[2 * i];
      int64_t size = width * sizeof(T);
      if (registers[2 * i + 1]) size = width / packed_linear::kGroup * sizeof(packed_linear::Fixed);
      if (i > 0) bytes += (rows * size + kLine - 1) / kLine * kLine;
    }
    scratch_.reset(new std::byte[bytes]);
    for (int64_t i = 0; i < count; i++) pass_.registers.push_back({scratch_.get() + begins[i], registers[2 * i]});
    pass_.registers[0].at = static_cast<std::byte*>(logits.mutable_data_ptr());
  }

  void check_layer(int64_t layer, int64_t table) const {
    WORKHORSE_CHECK(layer < int64_t(blocks_.size()) && table < int64_t(pass_.tables.size()),
                    "workhorse: an instruction names a layer or table that does not exist");
    const step::BlockTable& blocks = pass_.tables[table];
    for (int64_t i = 0; i < batch_ * blocks.blocks; i++)
      WORKHORSE_CHECK(blocks.at[i] >= 0 && blocks.at[i] < blocks_[layer],
                      "workhorse: a table names block ", blocks.at[i], ", which does not exist in layer ", layer);
  }

  void check(const Instruction& now) const {
    const int64_t registers = pass_.registers.size(), weights = pass_.weights.size();
    WORKHORSE_CHECK(now.to < registers && now.from < registers && now.other < registers && now.weight < weights &&
                        now.bias < weights,
                    "workhorse: an instruction names a register or weight that does not exist");
    const auto width = [&](int64_t reg) { return pass_.registers[reg].width; };
    const auto size = [&](int64_t weight, ScalarType type, int64_t count) {
      WORKHORSE_CHECK(weight < 0 || (weights_[weight].scalar_type() == type && weights_[weight].numel() == count),
                      "workhorse: a weight has another type or size than when the program was made");
    };
    const auto floats = [&](int64_t reg) { return int64_t(width(reg) * sizeof(T) / sizeof(float)); };
    const auto choices = [&](int64_t reg, int64_t top_k, int64_t count) {
      WORKHORSE_CHECK(width(reg) * sizeof(T) == top_k * sizeof(experts::Choice) + count * sizeof(int32_t),
                      "workhorse: a register of choices has another width");
    };
    const auto columns = [&](int64_t weight, int64_t count) {
      WORKHORSE_CHECK(weights_[weight].dim() == 2 && weights_[weight].size(1) == count,
                      "workhorse: a weight has another shape than when the program was made");
    };
    switch (now.op) {
      case Op::kEmbed: {
        const Tensor& table = weights_[now.weight];
        columns(now.weight, width(now.to));
        size(now.weight, type_, table.numel());
        for (int64_t i = 0; i < pass_.total; i++)
          WORKHORSE_CHECK(pass_.tokens[i] >= 0 && pass_.tokens[i] < table.size(0), "workhorse: token ",
                          pass_.tokens[i], " is not in the vocabulary of ", table.size(0));
        return;
      }
      case Op::kEmbedPosition:
        columns(now.weight, width(now.to));
        WORKHORSE_CHECK(weights_[now.weight].size(0) >= longest_ + now.options[0],
                        "workhorse: a sequence of ", longest_, " tokens exceeds the number of positions");
        return size(now.weight, type_, weights_[now.weight].numel());
      case Op::kNorm:
        WORKHORSE_CHECK(now.options[2] >= 0 && now.options[3] <= width(now.to),
                        "workhorse: a norm exceeds its register");
        size(now.weight, type_, now.options[0]);
        return size(now.bias, type_, now.options[0]);
      case Op::kLinear:
        columns(now.weight, width(now.from));
        size(now.weight, type_, now.options[0] * width(now.from));
        return size(now.bias, type_, now.options[0]);
      case Op::kPackedLinear: {
        using namespace packed_linear;
        const bool four_bits = now.options[2] >= 0;
        const int64_t parts = (now.options[0] + kLanes - 1) / kLanes * (width(now.from) / kGroup);
        const int64_t bytes = four_bits ? PackedWeight<4>::bytes : PackedWeight<8>::bytes;
        size(now.weight, ScalarType::Byte, parts * bytes);
        size(now.options[1], ScalarType::Short, parts * kLanes);
        if (four_bits) size(now.options[2], ScalarType::Byte, kLanes);
        return size(now.bias, type_, now.options[0]);
      }
      case Op::kRotate: {
        const int64_t angles = now.options[1];
        const ScalarType type = now.options[2] & step::kInFloat32 ? ScalarType::Float : type_;
        WORKHORSE_CHECK(2 * angles + 1 < int64_t(angles_.size()) && angles_[2 * angles].scalar_type() == type &&
                            angles_[2 * angles + 1].scalar_type() == type,
                        "workhorse: an instruction names angles that do not exist or have another type");
        return;
      }
      case Op::kStore:
        return check_layer(now.options[0], now.options[1]);
      case Op::kAttend:
        size(now.weight, ScalarType::Float, now.options[0]);
        size(now.bias, type_, now.options[0]);
        return check_layer(now.options[1], now.options[2]);
      case Op::kConvolve:
        columns(now.weight, width(now.to));
        size(now.weight, type_, now.options[2] * width(now.to));
        return check_layer(now.options[0], now.options[1]);
      case Op::kWave:
        return size(now.weight, ScalarType::Float, (width(now.to) + 1) / 2);
      case Op::kXielu:
        size(now.weight, type_, 1);
        return size(now.bias, type_, 1);
      case Op::kScore:
        columns(now.weight, width(now.from));
        size(now.weight, type_, floats(now.to) * width(now.from));
        return size(now.bias, type_, floats(now.to));
      case Op::kChoose:
        WORKHORSE_CHECK(now.options[0] <= floats(now.from) && floats(now.from) % now.options[2] == 0,
                        "workhorse: a router has fewer experts than choices");
        choices(now.to, now.options[0], floats(now.from));
        return size(now.weight, ScalarType::Float, floats(now.from));
      case Op::kOrder:
        return choices(now.to, now.options[0], now.options[1]);
      case Op::kExpert:
        choices(now.other, now.options[2], now.options[1]);
        WORKHORSE_CHECK(width(now.to) == now.options[2] * now.options[0],
                        "workhorse: the register of the experts has another width");
        size(now.weight, type_, now.options[1] * now.options[0] * (width(now.from) / now.options[2]));
        return size(now.bias, type_, now.options[1] * now.options[0]);
      case Op::kSend:
        WORKHORSE_CHECK(width(now.to) == now.options[0] * width(now.from),
                        "workhorse: the register of the pairs has another width");
        return;
      case Op::kGather:
        WORKHORSE_CHECK(width(now.from) == now.options[0] * width(now.to),
                        "workhorse: the register of the pairs has another width");
        return;
      default:
        return;
    }
  }
};

Tensor decode_step(const Tensor& program, const Tensor& numbers, const Tensor& registers, int64_t weights,
                   const std::vector<Tensor>& angles, const Tensor& tokens, const Tensor& counts,
                   const Tensor& lengths, const std::vector<Tensor>& tables, const std::vector<Tensor>& keys,
                   const std::vector<Tensor>& values, const Tensor& reaches, int64_t few, const Tensor& wanted,
                   int64_t vocab) {
  WORKHORSE_CHECK(!keys.empty() && registers.dim() == 2 && tokens.dim() == 1 && wanted.dim() == 1,
                  "workhorse: a step needs tokens, and keys and values");
  const ScalarType type = keys[0].scalar_type();
  WORKHORSE_CHECK(registers.size(0) > 0 && whole(registers, 2, "registers")[0] == vocab,
                  "workhorse: the first register must hold ", vocab, " logits");
  Tensor logits = torch::stable::new_empty(keys[0], {wanted.size(0), vocab});
  const std::shared_ptr<const Weights> kept = kept_weights().at(weights);
  const auto run = [&]<class T>(T) {
    Prepared<T>(program, numbers, registers, *kept, angles, tokens, counts, lengths, tables, keys, values, reaches,
                few, wanted, logits, type)
        .run();
  };
  if (type == ScalarType::BFloat16) run(BFloat16{});
  else if (type == ScalarType::Float) run(float{});
  else WORKHORSE_CHECK(false, "workhorse: keys must be bfloat16 or float32");
  return logits;
}

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(workhorse, m) {
  m.def(
      "decode_step(Tensor program, Tensor numbers, Tensor registers, int weights, Tensor[] angles, Tensor "
      "tokens, Tensor counts, Tensor lengths, Tensor[] tables, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor "
      "reaches, int few, Tensor wanted, int vocab) -> Tensor");
  m.def("keep_weights(Tensor[] weights) -> int");
  m.def("drop_weights(int number) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CompositeExplicitAutograd, m) {
  m.impl("keep_weights", TORCH_BOX(&workhorse::bindings::keep_weights));
  m.impl("drop_weights", TORCH_BOX(&workhorse::bindings::drop_weights));
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  m.impl("decode_step", TORCH_BOX(&workhorse::bindings::decode_step));
}
