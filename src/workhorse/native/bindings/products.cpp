// The gemms of ops/gemm/vectors.h for PyTorch.

#include <torch/csrc/stable/library.h>

#include <vector>

#include "bindings/matrices.h"
#include "ops/gemm/vectors.h"

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

void multiply(const Tensors& a, const Tensors& b, const Biases& biases, const std::vector<int64_t>& of,
              const Tensors& results) {
  switch (a[0].scalar_type()) {
    case ScalarType::Float: return multiply<float>(a, b, biases, of, results);
    case ScalarType::BFloat16: return multiply<BFloat16>(a, b, biases, of, results);
    default: STD_TORCH_CHECK(false, "workhorse: a and b must be float32 or bfloat16");
  }
}

// a b + bias.
Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  const Tensor c = result_of(a, b, bias);
  if (c.numel() != 0) multiply({a}, {b}, {bias}, {0}, {c});
  return c;
}

// For each bias, the sum of it and of the products a[i] b[i] whose of[i] is its number; these rise.
Tensors products(const Tensors& a, const Tensors& b, const std::vector<int64_t>& of, const Biases& biases) {
  STD_TORCH_CHECK(!a.empty() && a.size() == b.size() && a.size() == of.size() &&
                      of.back() + 1 == int64_t(biases.size()),
                  "workhorse: products need as many a as b, and the number of the result of each");
  Tensors results;
  for (size_t i = 0; i < a.size(); i++) {
    const int64_t made = results.size();
    if (of[i] == made && made < int64_t(biases.size())) {
      results.push_back(result_of(a[i], b[i], biases[made]));
      continue;
    }
    STD_TORCH_CHECK(of[i] == made - 1, "workhorse: the numbers of results must rise from 0 by 1");
    check(a[i], b[i]);
    const Tensor& c = results.back();
    STD_TORCH_CHECK(a[i].size(0) == c.size(0) && b[i].size(1) == c.size(1),
                    "workhorse: products that are added must have one shape");
  }
  for (const Tensor& one : a)
    STD_TORCH_CHECK(one.scalar_type() == a[0].scalar_type(), "workhorse: products made together must have one type");
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
