// Numbers for trials, and bf16 in plain arithmetic.
#pragma once
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

// From -1 to 1.
inline std::vector<float> random_floats(std::int64_t count, std::mt19937& source) {
  std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
  std::vector<float> result(count);
  for (float& value : result) value = distribution(source);
  return result;
}

inline std::vector<octavo::bf16> random_halves(std::int64_t count, std::mt19937& source) {
  std::vector<octavo::bf16> result;
  for (const float value : random_floats(count, source)) result.push_back(to_bf16(value));
  return result;
}

template <class Element>
std::vector<Element> random_elements(std::int64_t count, std::mt19937& source) {
  if constexpr (sizeof(Element) == 2) return random_halves(count, source);
  else return random_floats(count, source);
}

inline std::int64_t random_below(std::int64_t end, std::mt19937& source) {
  return static_cast<std::int64_t>(source() % static_cast<std::uint32_t>(end));
}
