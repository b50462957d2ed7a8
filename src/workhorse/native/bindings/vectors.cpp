// The gemms of ops/gemm/vectors.h for PyTorch.

#include <torch/csrc/stable/library.h>

#include <vector>

#include "bindings/matrices.h"
#include "ops/gemm/few_rows.h"

namespace workhorse::bindings {
namespace {

using gemm_vectors::Operand, gemm_vectors::Product;
using Tensors = std::vector<Tensor>;
using Biases = std::vector<std::optional<Tensor>>;

template <class T>
Product<T> product_of(const Tensor& c, const std::optional<Tensor>& bias) {
  return {{},
          static_cast<T*>(c.mutable_data_ptr()),
          c.size(1),
          bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr};
}

template <class T>
void multiply(const Tensors& a, const Tensors& b, const Biases& biases, const std::vector<int64_t>& of,
              const Tensors& results) {
  std::vector<Product<T>> products;
  for (size_t i = 0; i < results.size(); i++) products.push_back(product_of<T>(results[i], biases[i]));
  for (size_t i = 0; i < a.size(); i++)
    products[of[i]].terms.push_back({operand<Operand<T>, T>(a[i], 0), operand<Operand<T>, T>(b[i], 1), a[i].size(1)});
  in_shares([&](Share share) {
    for (size_t i = 0; i < results.size(); i++)
      in_grid(results[i].size(0), results[i].size(1), gemm_vectors::kHigh, gemm_vectors::kWide, share,
              [&](int64_t m, int64_t m_end, int64_t n, int64_t n_end) { products[i].run(m, m_end, n, n_end); });
  });
}

// a b + bias for few rows of a, if b is a weight that need not be packed; returns false otherwise.
template <class T>
bool multiply_few_rows(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& c) {
  using gemm_vectors::FewRows, gemm_vectors::kHigh;
  const Product<T> result = product_of<T>(c, bias);
  const auto left = operand<Operand<T>, T>(a, 0), right = operand<Operand<T>, T>(b, 1);
  const int64_t k = a.size(1), columns = c.size(1);
  const FewRows<T> few{left.at, right.at, a.size(0), k, result.c, result.stride, result.bias};
  const bool lie_in_rows = left.along && left.stride == k && right.along && right.stride == k;
  if (few.rows > FewRows<T>::kMost || !lie_in_rows || !FewRows<T>::suits(k)) return false;
  in_shares([&](Share share) {
    thread_local ScratchBuffer buffer;
    auto* const packed = (gemm_vectors::Word*)buffer.at_least(few.room() * sizeof(gemm_vectors::Word));
    const auto border = [&](int64_t i) { return i == share.of ? columns : columns / kHigh * i / share.of * kHigh; };
    const int64_t n = border(share.number), n_end = border(share.number + 1);
    if (n == n_end) return;
    few.pack(packed);
    few.run(packed, n, n_end);
  });
  return true;
}

bool multiply_few_rows(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const Tensor& c) {
  switch (a.scalar_type()) {
    case ScalarType::Float: return multiply_few_rows<float>(a, b, bias, c);
    case ScalarType::BFloat16: return multiply_few_rows<BFloat16>(a, b, bias, c);
    default: return false;
  }
}

void multiply(const Tensors& a, const Tensors& b, const Biases& biases, const std::vector<int64_t>& of,
              const Tensors& results) {
  switch (a[0].scalar_type()) {
    case ScalarType::Float: return multiply<float>(a, b, biases, of, results);
    case ScalarType::BFloat16: return multiply<BFloat16>(a, b, biases, of, results);
    default: WORKHORSE_CHECK(false, "workhorse: a and b must be float32 or bfloat16");
  }
}

// a b + bias.
Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  const Tensor c = result_of(a, b, bias);
  if (c.numel() != 0 && !multiply_few_rows(a, b, bias, c)) multiply({a}, {b}, {bias}, {0}, {c});
  return c;
}

// For each bias, the sum of the bias and of the matmuls a[i] b[i] whose of[i] is its index. of must be ascending.
Tensors products(const Tensors& a, const Tensors& b, const std::vector<int64_t>& of, const Biases& biases) {
  WORKHORSE_CHECK(!a.empty() && a.size() == b.size() && a.size() == of.size() &&
                      of.back() + 1 == int64_t(biases.size()),
                  "workhorse: a, b and of must have one length, and of must index the biases");
  Tensors results;
  for (size_t i = 0; i < a.size(); i++) {
    const int64_t made = results.size();
    if (of[i] == made && made < int64_t(biases.size())) {
      results.push_back(result_of(a[i], b[i], biases[made]));
      continue;
    }
    WORKHORSE_CHECK(of[i] == made - 1, "workhorse: result indices must increase from 0 by 1");
    check(a[i], b[i]);
    const Tensor& c = results.back();
    WORKHORSE_CHECK(a[i].size(0) == c.size(0) && b[i].size(1) == c.size(1),
                    "workhorse: matmuls that are added must have the same shape");
  }
  for (const Tensor& one : a)
    WORKHORSE_CHECK(one.scalar_type() == a[0].scalar_type(), "workhorse: matmuls of one call must have the same type");
  multiply(a, b, biases, of, results);
  return results;
}

}  // namespace
}  // namespace workhorse::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(workhorse, m) {
  m.def("product(Tensor a, Tensor b, Tensor? bias) -> Tensor");
  m.def("products(Tensor[] a, Tensor[] b, int[] of, Tensor?[] biases) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(workhorse, CPU, m) {
  m.impl("product", TORCH_BOX(&workhorse::bindings::product));
  m.impl("products", TORCH_BOX(&workhorse::bindings::products));
}
