// Recorded calls of operators (native/replay.py), made again without Python and autograd.

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/refuse.h"

namespace workhorse::bindings {
namespace {

using at::Tensor;
using c10::IValue, c10::TypeKind;
using Slots = std::vector<int64_t>;

constexpr int64_t kNoTensor = -1;  // in place of a slot

// Calls whose tensors lie in slots: the inputs first, then results, and constants, which stay from run to run, such
// as weights. All other arguments are what they were when the calls were recorded.
class Program : public torch::CustomClassHolder {
 public:
  Program(int64_t inputs, Slots of_constants, std::vector<Tensor> constants)
      : inputs_(inputs), slots_(inputs), of_constants_(std::move(of_constants)), constants_(std::move(constants)) {
    WORKHORSE_CHECK(of_constants_.size() == constants_.size(), "workhorse: a constant needs a slot");
    make_room(of_constants_, 0);
  }

  // Adds the call of an operator.
  //   arguments  all; None for tensors, lists of tensors and empty lists
  //   tensors    the slots of the tensors of each argument
  //   results    the slots of what it returns
  //   dead       the slots that nothing needs after it
  void call(const std::string& name, const std::string& overload, const std::vector<IValue>& arguments,
            const std::vector<Slots>& tensors, Slots results, Slots dead) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& expected = op.schema().arguments();
    WORKHORSE_CHECK(arguments.size() == expected.size() && tensors.size() == expected.size(),
                "workhorse: ", name, " has another number of arguments");
    for (const Slots& some : tensors) make_room(some, kNoTensor);
    make_room(results, kNoTensor);
    make_room(dead, 0);
    std::vector<Argument> all;
    for (size_t i = 0; i < expected.size(); i++)
      all.push_back(argument(*expected[i].type(), arguments[i], tensors[i]));
    calls_.push_back({op, std::move(all), std::move(results), std::move(dead)});
  }

  // Makes the calls; returns the tensors in these slots.
  std::vector<std::optional<Tensor>> run(std::vector<Tensor> inputs, const Slots& results) const {
    WORKHORSE_CHECK(int64_t(inputs.size()) == inputs_, "workhorse: a recording of ", inputs_, " inputs got ",
                inputs.size());
    const at::AutoDispatchBelowADInplaceOrView without_gradients;
    std::vector<Tensor> slots = std::move(inputs);
    slots.resize(slots_);
    for (size_t i = 0; i < constants_.size(); i++) slots[of_constants_[i]] = constants_[i];
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      for (const Argument& one : call.arguments) stack.push_back(one.value(slots));
      call.op.callBoxed(stack);
      auto slot = call.results.begin();
      const auto keep = [&](Tensor made) {
        WORKHORSE_CHECK(slot != call.results.end(), "workhorse: ", call.op.schema().name(), " returned more than before");
        if (*slot != kNoTensor) slots[*slot] = std::move(made);
        slot++;
      };
      for (IValue& made : stack)
        if (made.isTensor()) keep(std::move(made).toTensor());
        else for (Tensor& one : made.toTensorVector()) keep(std::move(one));
      stack.clear();
      for (const int64_t over : call.dead) slots[over].reset();
    }
    std::vector<std::optional<Tensor>> found;
    for (const int64_t slot : results) found.push_back(in(slots, slot));
    return found;
  }

 private:
  struct Argument {
    enum Kind { kConstant, kTensor, kTensors, kMaybeTensors } kind;
    IValue constant;
    Slots slots;

    IValue value(const std::vector<Tensor>& all) const {
      if (kind == kConstant) return constant;
      if (kind == kTensor) return all[slots[0]];
      if (kind == kTensors) {
        c10::List<Tensor> some;
        for (const int64_t slot : slots) some.push_back(all[slot]);
        return some;
      }
      c10::List<std::optional<Tensor>> some;
      for (const int64_t slot : slots) some.push_back(in(all, slot));
      return some;
    }
  };

  struct Call {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    Slots results, dead;
  };

  static std::optional<Tensor> in(const std::vector<Tensor>& slots, int64_t slot) {
    return slot == kNoTensor ? std::nullopt : std::optional(slots[slot]);
  }

  static Argument argument(const c10::Type& type, const IValue& value, const Slots& slots) {
    const auto* maybe = type.castRaw<c10::OptionalType>();
    const c10::Type& given = maybe ? *maybe->getElementType() : type;
    const auto* list = given.castRaw<c10::ListType>();
    const bool tensor = given.kind() == TypeKind::TensorType;
    if (list && (!slots.empty() || (value.isNone() && !maybe))) {
      const c10::Type& one = *list->getElementType();
      if (one.kind() == TypeKind::TensorType) return {Argument::kTensors, {}, in_slots(slots)};
      if (one.kind() == TypeKind::OptionalType && one.containedType(0)->kind() == TypeKind::TensorType)
        return {Argument::kMaybeTensors, {}, slots};
      WORKHORSE_CHECK(slots.empty(), "workhorse: no list of tensors is expected");
      return {Argument::kConstant, c10::impl::GenericList(list->getElementType()), {}};
    }
    if (!slots.empty()) return {Argument::kTensor, {}, in_slots(slots)};
    if (tensor && value.isScalar()) {
      Tensor number = c10::scalar_to_tensor(value.toScalar());  // which does not decide the type of a result
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return {Argument::kConstant, number, {}};
    }
    if (tensor && value.isNone() && !maybe) return {Argument::kConstant, Tensor(), {}};
    WORKHORSE_CHECK(value.type()->isSubtypeOf(type), "workhorse: ", value.type()->str(), " is no ", type.str());
    return {Argument::kConstant, value, {}};
  }

  static const Slots& in_slots(const Slots& slots) {
    WORKHORSE_CHECK(std::count(slots.begin(), slots.end(), kNoTensor) == 0, "workhorse: a tensor is missing");
    return slots;
  }

  void make_room(const Slots& slots, int64_t least) {
    for (const int64_t slot : slots) {
      WORKHORSE_CHECK(slot >= least, "workhorse: there is no slot ", slot);
      slots_ = std::max(slots_, slot + 1);
    }
  }

  int64_t inputs_, slots_;
  Slots of_constants_;
  std::vector<Tensor> constants_;
  std::vector<Call> calls_;
};

}  // namespace

TORCH_LIBRARY(workhorse_replay, library) {
  library.class_<Program>("Program")
      .def(torch::init<int64_t, Slots, std::vector<Tensor>>())
      .def("call", &Program::call)
      .def("run", &Program::run);
}

}  // namespace workhorse::bindings
