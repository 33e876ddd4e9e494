// Weights of a map in the layout of panels, in memory of exactly the size that they need.
#pragma once
#include <vector>

#include "ops.h"

// `layer_ops` are those of the weight's dtype.
template <class Element>
std::vector<Element> packed_weight(const octavo::LayerOps& layer_ops, octavo::Pool& pool, const std::vector<Element>& weight,
                                   std::int64_t in_size, std::int64_t out_size, bool is_gated) {
  const std::int64_t outputs_per_panel = is_gated ? 16 : 32;
  const std::int64_t num_panels = (out_size + outputs_per_panel - 1) / outputs_per_panel;
  std::vector<Element> result(num_panels * ((in_size + 31) / 32) * 1024);
  layer_ops.pack_linear(octavo::PackArgs{weight.data(), in_size, out_size, is_gated, result.data()}, pool);
  return result;
}
