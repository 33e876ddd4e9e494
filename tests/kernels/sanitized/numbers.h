// Numbers for trials, and 16-bit floats in plain arithmetic.
#pragma once
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "ops.h"

inline octavo::bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<octavo::bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float widened(float value) { return value; }

inline float widened(octavo::bf16 half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of what is finite.
inline octavo::f16 to_f16(float value) {
  int exponent;
  std::frexp(value, &exponent);
  const bool is_normal = value != 0.0f && exponent > -14;
  const double steps = std::nearbyint(std::ldexp(std::fabs(double{value}), is_normal ? 11 - exponent : 24));
  const int bits = static_cast<int>(steps) + (is_normal ? (exponent + 13) * 1024 : 0);
  return {static_cast<std::uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0))};
}

inline float widened(octavo::f16 half) {
  const int exponent = half.bits >> 10 & 0x1f, mantissa = half.bits & 0x3ff;
  const float size = exponent ? std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25)
                              : std::ldexp(static_cast<float>(mantissa), -24);
  return half.bits & 0x8000 ? -size : size;
}

inline void narrow_to(float& to, float value) { to = value; }
inline void narrow_to(octavo::bf16& to, float value) { to = to_bf16(value); }
inline void narrow_to(octavo::f16& to, float value) { to = to_f16(value); }

// From -1 to 1.
inline std::vector<float> random_floats(std::int64_t count, std::mt19937& source) {
  std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
  std::vector<float> result(count);
  for (float& value : result) value = distribution(source);
  return result;
}

template <class Element>
std::vector<Element> random_elements(std::int64_t count, std::mt19937& source) {
  std::vector<Element> result(count);
  const std::vector<float> values = random_floats(count, source);
  for (std::size_t i = 0; i < result.size(); ++i) narrow_to(result[i], values[i]);
  return result;
}

inline std::vector<octavo::bf16> random_halves(std::int64_t count, std::mt19937& source) {
  return random_elements<octavo::bf16>(count, source);
}

inline std::int64_t random_below(std::int64_t end, std::mt19937& source) {
  return static_cast<std::int64_t>(source() % static_cast<std::uint32_t>(end));
}
