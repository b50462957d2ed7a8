// Vectors longer than the CPU's, as two halves each. GCC has vectors of any length, but keeps vectors in memory if no
// register has their length.
#pragma once

#include <bit>
#include <type_traits>

namespace workhorse {

#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <class T, int N>
struct Halves;

template <class T, int N>
struct Register {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

// N elements. Vectors of the same N are all registers or all halves, so that they convert into each other.
template <class T, int N>
using Vector = typename std::conditional_t<N * 4 <= kRegister, Register<T, N>, std::type_identity<Halves<T, N>>>::type;

template <class V>
constexpr bool kHalved = requires { typename V::Half; };

// A vector with one value in all lanes. GCC optimises `value - 0`, which is the value itself, but computes `0 + value`,
// which is 0 for -0.
template <class V, class T>
inline V broadcast(T value) {
  if constexpr (kHalved<V>) return V(value);
  else return value - V{};
}

template <class T, int N>
struct Halves {
  using Half = Vector<T, N / 2>;
  using Mask = Vector<int32_t, N>;

  Half low, high;

  Halves() = default;
  Halves(Half low, Half high) : low(low), high(high) {}
  Halves(T value) : low(broadcast<Half>(value)), high(low) {}

  T operator[](int lane) const { return lane < N / 2 ? low[lane] : high[lane - N / 2]; }

  // The same bits as elements of another type.
  template <class To>
  explicit operator To() const { return {(typename To::Half)low, (typename To::Half)high}; }

  Halves operator-() const { return {-low, -high}; }
  Halves& operator+=(Halves b) { return *this = *this + b; }
  Halves& operator-=(Halves b) { return *this = *this - b; }
  Halves& operator*=(Halves b) { return *this = *this * b; }
  friend Halves operator+(Halves a, Halves b) { return {a.low + b.low, a.high + b.high}; }
  friend Halves operator-(Halves a, Halves b) { return {a.low - b.low, a.high - b.high}; }
  friend Halves operator*(Halves a, Halves b) { return {a.low * b.low, a.high * b.high}; }
  friend Halves operator/(Halves a, Halves b) { return {a.low / b.low, a.high / b.high}; }
  friend Halves operator&(Halves a, Halves b) { return {a.low & b.low, a.high & b.high}; }
  friend Halves operator|(Halves a, Halves b) { return {a.low | b.low, a.high | b.high}; }
  friend Halves operator<<(Halves a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Halves operator>>(Halves a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend Mask operator<(Halves a, Halves b) { return {a.low < b.low, a.high < b.high}; }
  friend Mask operator>(Halves a, Halves b) { return {a.low > b.low, a.high > b.high}; }
  friend Mask operator>=(Halves a, Halves b) { return {a.low >= b.low, a.high >= b.high}; }
  friend Mask operator==(Halves a, Halves b) { return {a.low == b.low, a.high == b.high}; }
};

}  // namespace workhorse
